"""Contract 4.3 and finding F2: OpenAI chat."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.gateway.asking import ask
from tests.gateway.fakes import engine, gateway, until
from tests.gateway.test_gateway import CHUNKS, Streaming

MESSAGES = [{"role": "user", "content": "ß"}]
CHAT = {"model": "m", "route_key": "k", "messages": MESSAGES, "seed": 18446744073709551617}
ALIASES = ("/chat/completions", "/v1/chat/completions")


async def complete(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    if payload.get("stream"):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for chunk in CHUNKS:
            await answer.write(chunk)
        return answer
    return web.json_response({"object": "chat.completion"}, status=201, headers={"x-e": "1"})


@pytest.mark.parametrize("role", ["rollout", "genrm", "teacher"])
@pytest.mark.parametrize("path", ALIASES)
async def test_chat_goes_out_under_the_backend_s_own_model_name(role: str, path: str) -> None:
    async with gateway() as front, engine(complete) as upstream:
        front.publish(role, upstream.url, served_model_name="org/served")
        answer = await ask("POST", f"{front.url}/{role}{path}", CHAT)
        streamed = await ask("POST", f"{front.url}/{role}{path}", CHAT | {"stream": True})
    assert (answer.status, answer.json) == (201, {"object": "chat.completion"})
    assert answer.headers["x-e"] == "1"
    assert streamed.body == b"".join(CHUNKS)
    assert upstream.paths == ["/v1/chat/completions"] * 2
    sent = json.loads(upstream.posts[0][1])
    assert sent == {"model": "org/served", "messages": MESSAGES, "seed": 18446744073709551617}


async def test_a_chat_without_a_model_goes_to_the_role_s_default() -> None:
    async with gateway() as front, engine(complete) as upstream:
        front.publish("teacher", upstream.url)
        answer = await ask("POST", f"{front.url}/teacher/chat/completions", {"messages": []})
    assert answer.status == 201
    assert json.loads(upstream.posts[0][1])["model"] == "served"


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({}, "messages must be a list"),
        ({"messages": {}}, "messages must be a list"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": [], "stream": "no"}, "stream"),
        ({"messages": [], "model": "nobody"}, "Unknown model"),
        (b"{", "not JSON"),
        (b"[]", "object"),
    ],
)
async def test_a_bad_chat_is_400_and_reaches_no_engine(payload: Any, says: str) -> None:
    async with gateway() as front, engine(complete) as upstream:
        front.publish("genrm", upstream.url)
        answer = await ask("POST", f"{front.url}/genrm/v1/chat/completions", payload)
    assert (answer.status, says in answer.detail) == (400, True)
    assert upstream.posts == []


async def test_a_model_whose_backend_name_is_not_declared_is_503() -> None:
    async with gateway() as front, engine(complete) as upstream:
        front.publish("genrm", upstream.url, served_model_name=None)
        answer = await ask("POST", f"{front.url}/genrm/v1/chat/completions", CHAT)
    assert answer.status == 503
    assert answer.detail == "Discovery does not declare the backend served model name"
    assert answer.headers["Retry-After"] == "1"
    assert upstream.posts == []


@pytest.mark.parametrize("direct", [False, True])
async def test_the_key_of_a_group_is_kept_to_the_router_and_chooses_a_replica(direct: bool) -> None:
    key = {"x-smg-routing-key": "group-7"}
    async with gateway(direct=direct) as front, engine(complete) as router, engine(complete) as one:
        front.publish("rollout", one.url, route_mode="SGLANG_ROUTER", router_url=router.url)
        front.publish("teacher", one.url, router.url)
        await ask("POST", f"{front.url}/rollout/v1/chat/completions", CHAT, key)
        assert router.posts[-1][0].getall("X-SMG-Routing-Key") == ["group-7"]
        for _ in range(4):
            await ask("POST", f"{front.url}/teacher/v1/chat/completions", CHAT, key)
    assert sorted((len(one.posts), len(router.posts) - 1)) == [0, 4]


@pytest.mark.parametrize("path", ALIASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_of_engines_that_are_not_the_run_s_own_reaches_their_router_without_discovery(
    path: str, stream: bool
) -> None:
    """Finding F2: no registry was ever published here."""
    sent = json.dumps(CHAT | {"stream": stream}).encode()
    async with (
        engine(complete) as router,
        gateway(rollout_router=router.url + "/") as front,
    ):
        answer = await ask("POST", f"{front.url}/rollout{path}", sent)
        assert (await ask("POST", f"{front.url}/genrm{path}", sent)).status == 503
    assert answer.status == (200 if stream else 201)
    assert answer.body == (b"".join(CHUNKS) if stream else b'{"object": "chat.completion"}')
    assert router.paths == ["/v1/chat/completions"]
    assert router.posts[0][1] == sent


@pytest.mark.parametrize("routed", [False, True])
async def test_a_chat_whose_caller_leaves_is_aborted_at_the_engine(routed: bool) -> None:
    source = Streaming()
    async with gateway() as front, engine(source) as upstream, engine(complete) as replica:
        where = {"route_mode": "SGLANG_ROUTER", "router_url": upstream.url} if routed else {}
        role, behind = ("rollout", replica) if routed else ("teacher", upstream)
        front.publish(role, behind.url, **where)
        source.go.put_nowait(True)
        async with aiohttp.ClientSession() as session:
            payload = CHAT | {"stream": True, "rid": "chat-1"}
            answer = await session.post(f"{front.url}/{role}/v1/chat/completions", json=payload)
            assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
            answer.close()
        await until(lambda: upstream.closed == ["chat-1"] and behind.aborts == ["chat-1"])


@pytest.mark.parametrize("kind", ["generate", "chat/completions"])
async def test_a_compressed_answer_arrives_decoded(kind: str) -> None:
    async def squeeze(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        answer = web.json_response({"text": "x" * 4000})
        answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async with gateway() as front, engine(squeeze) as upstream:
        front.publish("genrm", upstream.url)
        payload = {"text": "x"} if kind == "generate" else CHAT
        answer = await ask(
            "POST", f"{front.url}/genrm/{kind}", payload, {"Accept-Encoding": "gzip"}
        )
    assert upstream.posts[0][0]["Accept-Encoding"] == "gzip"
    assert "Content-Encoding" not in answer.headers
    assert answer.json == {"text": "x" * 4000}
