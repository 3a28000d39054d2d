import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.gateway.fakes import Gateway, engine, gateway, until

PAYLOAD = {"model": "m", "route_key": "k", "input_ids": [1, 2], "rid": "run/1"}


async def echo(request: web.Request, payload: dict[str, Any]) -> web.Response:
    return web.json_response({"text": "ok"}, headers={"x-engine": "e"})


async def post(
    url: str, payload: Any = PAYLOAD, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            url, data=data, headers={"Content-Type": "application/json"} | (headers or {})
        ) as answer,
    ):
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()


def detail(body: bytes) -> Any:
    return json.loads(body)["detail"]


async def test_a_payload_passes_without_its_selectors_and_the_answer_unchanged() -> None:
    big = b'{"model":"m","route_key":"k", "input_ids":[18446744073709551617],"t":1.50,"rid":"r"}'
    async with gateway() as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        headers = {
            "x-request-id": "7",
            "x-smg-routing-key": "group-1",
            "Connection": "x-hop",
            "x-hop": "no",
            "Content-Type": "application/json; charset=utf-8",
        }
        status, answered, body = await post(f"{front.url}/teacher/generate", big, headers=headers)
    assert (status, json.loads(body), answered["x-engine"]) == (200, {"text": "ok"}, "e")
    seen, raw = upstream.posts[0]
    assert raw == b'{"input_ids":[18446744073709551617],"t":1.50,"rid":"r"}'
    assert seen["x-request-id"] == "7"
    assert seen["X-SMG-Routing-Key"] == "group-1"
    assert seen["Content-Type"] == "application/json; charset=utf-8"
    assert "x-hop" not in seen
    assert "X-SMG-Routing-Key" in list(seen)
    assert seen["Host"] == upstream.url.removeprefix("http://")
    assert seen["Content-Length"] == str(len(raw))
    assert upstream.aborts == []


async def test_replicas_take_turns_and_affinity_sticks() -> None:
    async with gateway() as front, engine(echo) as first, engine(echo) as second:
        front.publish("genrm", first.url, second.url)
        url = f"{front.url}/genrm/generate"
        for _ in range(4):
            await post(url)
        assert (len(first.posts), len(second.posts)) == (2, 2)
        for _ in range(4):
            await post(url, headers={"X-SMG-Routing-Key": "k"})
        assert sorted((len(first.posts), len(second.posts))) == [2, 6]


async def test_rollout_goes_to_its_router() -> None:
    async with gateway() as front, engine(echo) as router, engine(echo) as replica:
        front.publish(
            "rollout", replica.url, route_mode="SGLANG_ROUTER", router_url=router.url + "/"
        )
        assert (await post(f"{front.url}/rollout/generate"))[0] == 200
    assert (len(router.posts), len(replica.posts)) == (1, 0)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        ({"text": "x", "stream": "yes"}, "stream"),
        ({"text": "x", "stream": 1}, "stream"),
        ({"text": "x", "stream": None}, "stream"),
        ({"text": "x", "messages": []}, "not both"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"sampling_params": {}}, "input_ids or text"),
        ({"text": "x", "model": 3}, "model"),
        ({"text": "x", "model": ""}, "model"),
        ({"text": "x", "route_key": []}, "route_key"),
        ({"text": "x", "model": "nobody"}, "Unknown model"),
        ({"text": "x", "route_key": "nobody"}, "Unknown route_key"),
    ],
)
async def test_a_bad_request_is_400_and_reaches_no_engine(payload: Any, says: str) -> None:
    async with gateway() as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        status, headers, body = await post(f"{front.url}/teacher/generate", payload)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert says in detail(body)
    assert upstream.posts == []


@pytest.mark.parametrize("state", ["SLEEPING", "DRAINING", None])
async def test_a_model_that_is_not_ready_is_503_and_may_be_tried_again(state: str | None) -> None:
    async with gateway() as front, engine(echo) as upstream:
        if state is not None:
            front.publish("genrm", upstream.url, state=state)
        status, headers, _ = await post(f"{front.url}/genrm/generate", PAYLOAD | {"stream": True})
    assert (status, headers["retry-after"]) == (503, "1")
    assert headers["content-type"] == "application/json"
    assert upstream.posts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_refusal_keeps_its_status_and_retry_after(stream: bool) -> None:
    async def closed(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "closed"}, status=503, headers={"Retry-After": "5"})

    async with gateway() as front, engine(closed) as upstream:
        front.publish("genrm", upstream.url)
        status, headers, body = await post(
            f"{front.url}/genrm/generate", PAYLOAD | {"stream": stream}
        )
    assert (status, headers["retry-after"], detail(body)) == (503, "5", "closed")
    assert len(upstream.posts) == 1
    assert upstream.aborts == []


async def test_an_error_that_is_an_unread_stream_gets_a_general_text() -> None:
    async def broken(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(status=500)
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        await answer.write(b"a trace")
        await answer.write_eof()
        return answer

    async with gateway() as front, engine(broken) as upstream:
        front.publish("genrm", upstream.url)
        status, _, body = await post(f"{front.url}/genrm/generate")
    assert (status, detail(body)) == (500, "Inference backend answered 500")


async def test_an_answer_that_is_not_json_is_502() -> None:
    async def page(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.Response(text="<html>")

    async with gateway() as front, engine(page) as upstream:
        front.publish("genrm", upstream.url)
        status, _, body = await post(f"{front.url}/genrm/generate")
    assert (status, detail(body)) == (502, "Inference backend did not answer JSON")


async def test_an_engine_that_hangs_up_is_502_and_is_not_asked_again() -> None:
    async def hang_up(request: web.Request, payload: dict[str, Any]) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with gateway() as front, engine(hang_up) as first, engine(echo) as second:
        front.publish("genrm", first.url, second.url)
        status, _, body = await post(f"{front.url}/genrm/generate")
        assert (status, detail(body)) == (502, "Inference backend is unavailable")
        assert (len(first.posts), len(second.posts)) == (1, 0)
        await until(lambda: first.aborts == ["run/1"])


async def test_an_engine_that_is_not_there_is_502() -> None:
    async with gateway() as front:
        front.publish("genrm", "http://127.0.0.1:9")
        assert (await post(f"{front.url}/genrm/generate", {"text": "x"}))[0] == 502


async def test_the_deadline_is_504_and_the_engine_is_let_go() -> None:
    async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with gateway(timeout=0.2) as front, engine(never) as upstream:
        front.publish("genrm", upstream.url)
        status, _, body = await post(f"{front.url}/genrm/generate")
        assert (status, detail(body)) == (504, "Inference request timed out")
        await until(lambda: upstream.closed == ["run/1"] and upstream.aborts == ["run/1"])
    assert len(upstream.posts) == 1


CHUNKS = [b'data: {"i":%d}\r\n\r\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]


class Streaming:
    """Sends a chunk each time it is told to, so that nothing arrives by accident."""

    def __init__(self) -> None:
        self.go: asyncio.Queue[bool] = asyncio.Queue()

    async def __call__(self, request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "x-s": "1"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for chunk in CHUNKS:
            if not await self.go.get():
                assert request.transport is not None
                request.transport.abort()
                break
            await answer.write(chunk)
        return answer


async def test_a_stream_passes_chunk_by_chunk_and_byte_for_byte() -> None:
    source = Streaming()
    async with gateway() as front, engine(source) as upstream, aiohttp.ClientSession() as session:
        front.publish("teacher", upstream.url)
        source.go.put_nowait(True)
        async with session.post(
            f"{front.url}/teacher/generate", json=PAYLOAD | {"stream": True}
        ) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert answer.headers["x-s"] == "1"
            received = []
            for chunk in CHUNKS:  # each arrives before the engine may send the next
                received.append(await answer.content.readexactly(len(chunk)))
                source.go.put_nowait(True)
            received.append(await answer.content.read())
    assert received == [*CHUNKS, b""]
    assert upstream.aborts == []
    assert upstream.closed == []


async def test_a_stream_that_breaks_after_its_first_chunk_is_broken_off_and_not_replayed() -> None:
    source = Streaming()
    async with (
        gateway() as front,
        engine(source) as first,
        engine(source) as second,
        aiohttp.ClientSession() as session,
    ):
        front.publish("teacher", first.url, second.url)
        source.go.put_nowait(True)
        async with session.post(
            f"{front.url}/teacher/generate", json=PAYLOAD | {"stream": True}
        ) as answer:
            assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
            source.go.put_nowait(False)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        assert (len(first.posts), len(second.posts)) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_takes_its_request_along(stream: bool) -> None:
    source = Streaming()
    async with gateway() as front, engine(source) as upstream:
        front.publish("teacher", upstream.url)
        source.go.put_nowait(True)
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(
                session.post(
                    f"{front.url}/teacher/generate", json=PAYLOAD | {"stream": stream, "rid": "r"}
                )
            )
            await upstream.seen.wait()
            if stream:
                answer = await asked
                assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
                answer.close()
            else:
                asked.cancel()
        await until(lambda: upstream.closed == ["r"] and upstream.aborts == ["r"])


async def test_behind_a_router_every_engine_is_told_that_the_caller_left() -> None:
    source = Streaming()
    async with (
        gateway() as front,
        engine(source) as router,
        engine(echo) as first,
        engine(echo) as second,
    ):
        routed = {"route_mode": "SGLANG_ROUTER", "router_url": router.url}
        front.publish("rollout", first.url, second.url, **routed)
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(f"{front.url}/rollout/generate", json=PAYLOAD))
            await router.seen.wait()
            asked.cancel()
        await until(lambda: first.aborts == second.aborts == ["run/1"])
        assert router.aborts == []


async def test_a_request_without_an_id_of_its_own_aborts_nobody_else() -> None:
    async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with gateway(timeout=0.2) as front, engine(never) as upstream:
        front.publish("genrm", upstream.url)
        for rid in ({}, {"rid": ""}, {"rid": None}, {"rid": 3}):
            assert (await post(f"{front.url}/genrm/generate", {"text": "x"} | rid))[0] == 504
        # on a busy machine one may be given up before the engine has read it
        await until(lambda: len(upstream.closed) == len(upstream.posts))
    assert upstream.posts
    assert upstream.aborts == []


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def test_discovery_is_served_as_it_was_pushed() -> None:
    async with gateway() as front:
        assert (await get(f"{front.url}/genrm/engines"))[0] == 503
        document = front.publish("genrm", "http://engine:1")
        for query in ("", "?schema=2", "?schema=2&model_name=m"):
            assert await get(f"{front.url}/genrm/engines{query}") == (200, document)
        assert (await get(f"{front.url}/genrm/engines?model_name=x"))[0] == 404
        assert await get(f"{front.url}/genrm/engines?schema=3") == (
            400,
            {"detail": "Unsupported discovery schema"},
        )


async def test_health_says_what_could_be_called() -> None:
    async with gateway() as front:
        nothing = {"schema_version": 2, "role": "genrm", "gateway_alive": True}
        assert await get(f"{front.url}/genrm/health?schema=2") == (
            200,
            nothing | {"registry_available": False, "ready": False, "models": {}},
        )
        for term, state, ready in ((1, "READY", True), (2, "SLEEPING", False)):
            front.publish("genrm", "http://engine:1", term=term, state=state)
            models = {"m": {"state": state, "ready": ready}}
            assert await get(f"{front.url}/genrm/health?schema=2") == (
                200,
                nothing | {"registry_available": True, "ready": ready, "models": models},
            )
        assert await get(f"{front.url}/healthz") == (200, {"status": "ok"})


async def test_nothing_public_writes_and_unknown_routes_are_404() -> None:
    async with gateway(roles=["genrm"]) as front:
        for path in ("/", "/registry", "/registry/genrm", "/genrm/offload", "/rollout/generate"):
            for method in ("GET", "PUT", "POST"):
                assert await ask(front, method, path) == 404
        assert await ask(front, "GET", "/genrm/generate") == 405
        assert await ask(front, "PUT", "/genrm/generate") == 405
        assert await ask(front, "POST", "/genrm/engines") == 405


async def ask(front: Gateway, method: str, path: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, front.url + path) as answer,
    ):
        return answer.status
