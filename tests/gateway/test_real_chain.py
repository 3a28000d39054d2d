"""A caller, the gateway, a real router and two real fenced SGLang engines, one behind the other."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_infer.discovery import InferenceClient, InferenceRoutingError
from relax_infer.engines import RouterAdapter, read_request_log
from relax_infer.gateway.judge import ChatTemplates
from tests.e2e.looking import until
from tests.engines.checkpoints import VOCABULARY
from tests.engines.test_real_group import RealGroup, real, router, urls
from tests.gateway.asking import ask
from tests.gateway.fakes import Gateway, gateway

__all__ = ["real", "router"]

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

SERVED = "policy"


@asynccontextmanager
async def chain(
    real: RealGroup, router: RouterAdapter, *, routed: bool = True, discovered: bool = True
) -> AsyncIterator[Gateway]:
    """The gateway before engines that are awake: the policy's behind the router or directly, and
    the same ones as the judge's directly. ``discovered``: else rollout's chat goes to the router as
    it is, as for engines that are not the run's own."""
    engines = urls(await real.ready(0))
    await router.set_workers(engines)
    route = {"route_mode": "SGLANG_ROUTER", "router_url": router.url} if routed else {}
    templates = ChatTemplates({"m": real.folder / "version-0"})
    past = None if discovered else router.url
    async with gateway(rollout_router=past, genrm_render=templates) as front:
        front.publish("rollout", *engines, served_model_name=SERVED, **route)
        front.publish("genrm", *engines, served_model_name=SERVED)
        yield front


def generation(rid: str, tokens: int = 6, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": [6, 2, 9], "rid": rid, "sampling_params": sampling, **more}


async def logged(real: RealGroup, rid: str) -> list[list[dict[str, Any]]]:
    """What each engine's own log says of requests whose ids begin so."""
    logs = [Path(each.request_log or "") for each in await real.group.describe()]
    return [[e for e in read_request_log(p) if str(e["rid"]).startswith(rid)] for p in logs]


async def streamed(url: str, payload: dict[str, Any]) -> bytes:
    got = await ask("POST", f"{url}/generate", payload)
    assert got.status == 200
    assert got.headers["Content-Type"].startswith("text/event-stream")
    return got.body


async def test_a_stream_comes_through_as_the_engine_sent_it(real: RealGroup, router: RouterAdapter):
    async with chain(real, router) as front:
        through = await streamed(f"{front.url}/rollout", generation("s1", stream=True))
        direct = await streamed(urls(await real.group.probe())[0], generation("s2", stream=True))
    events = [_events(body) for body in (through, direct)]
    assert events[0][-1] == events[1][-1]
    for texts in events:  # how many tokens an event brings is the engine's, and of the moment
        assert len(set(texts)) > 1
        assert all(later.startswith(text) for text, later in pairwise(texts))
    assert through.endswith(b"data: [DONE]\n\n")


def _events(body: bytes) -> list[str]:
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line)["text"] for line in lines]


async def test_chat_is_rendered_by_the_engine_s_own_template(
    real: RealGroup, router: RouterAdapter
):
    async with chain(real, router, discovered=False) as front:
        got = await ask(
            "POST",
            f"{front.url}/rollout/v1/chat/completions",
            {
                "model": SERVED,
                "messages": [{"role": "user", "content": "1+2"}],
                "max_tokens": 4,
                "temperature": 0,
            },
        )
        models = await ask("GET", f"{front.url}/rollout/v1/models")
    assert got.status == 200, got.body
    assert got.json["object"] == "chat.completion"
    assert got.json["usage"]["prompt_tokens"] == len("1+2=")
    assert got.json["usage"]["completion_tokens"] <= 4
    assert [each["id"] for each in models.json["data"]] == ["m"]


CHAT = {
    "messages": [{"role": "user", "content": "1+2"}],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
NAMED: dict[str, dict[str, str]] = {
    "by nothing": {},
    "by id": {"model": "m"},
    "by alias": {"model": "alias"},
    "by route key": {"route_key": "k"},
}


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_chat_by_discovery_reaches_the_model_under_its_own_name(
    real: RealGroup, router: RouterAdapter, named: dict[str, str], path: str
):
    async with chain(real, router) as front:
        url = f"{front.url}/rollout{path}"
        got = await ask("POST", url, {**CHAT, **named})
        stream = await ask("POST", url, {**CHAT, **named, "stream": True})
    assert got.status == 200, got.body
    assert (got.json["object"], got.json["model"]) == ("chat.completion", SERVED)
    assert got.json["usage"]["prompt_tokens"] == len("1+2=")
    assert got.json["usage"]["completion_tokens"] == 4
    assert stream.status == 200
    parts = [json.loads(line[6:]) for line in stream.body.decode().split("\n\n") if "{" in line]
    assert {part["model"] for part in parts} == {SERVED}
    said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert said == got.json["choices"][0]["message"]["content"]


async def test_a_model_is_found_by_any_of_its_names_and_never_by_another(
    real: RealGroup, router: RouterAdapter
):
    async with chain(real, router) as front:
        url = f"{front.url}/rollout"
        texts = set[str]()
        for n, named in enumerate(NAMED.values()):
            got = await ask("POST", f"{url}/generate", {**generation(f"name-{n}"), **named})
            assert got.status == 200, got.body
            texts.add(got.json["text"])
        assert len(texts) == 1
        for wrong in ({"model": SERVED}, {"model": "k"}, {"route_key": "alias"}, {"model": "M"}):
            got = await ask("POST", f"{url}/generate", {**generation("wrong"), **wrong})
            assert got.status == 400, got.body
            assert (await ask("POST", f"{url}/v1/chat/completions", CHAT | wrong)).status == 400
    assert await logged(real, "wrong") == [[], []]


async def test_a_judge_s_messages_come_to_the_engine_as_its_template_says(
    real: RealGroup, router: RouterAdapter
):
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    asked = {"messages": CHAT["messages"], "sampling_params": sampling, "rid": "judged"}
    async with chain(real, router) as front:
        url = f"{front.url}/genrm/generate"
        got = await ask("POST", url, {**asked, "route_key": "k"})
        ids = [VOCABULARY.index(c) for c in "1+2="]
        raw = await ask("POST", url, {"input_ids": ids, "sampling_params": sampling})
        judged = await logged(real, "judged")
        await real.group.offload(real.operation())
        closed = await ask("POST", url, asked)
    assert got.status == 200, got.body
    assert got.json == {"response": raw.json["text"].strip()}
    assert sorted(len(each) for each in judged) == [0, 2], "admitted and ended, at one of the two"
    assert (closed.status, closed.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize("way", ["to the router", "by the gateway", "to the engines"])
async def test_a_client_with_discovery_gets_what_the_gateway_s_callers_get(
    real: RealGroup, router: RouterAdapter, way: str
):
    async with chain(real, router, routed=way != "to the engines") as front:
        url = f"{front.url}/rollout"
        by = url if way == "by the gateway" else None
        expected = (await ask("POST", f"{url}/generate", generation(f"{way}-0"))).json["text"]
        async with InferenceClient(discovery_url=url, gateway_url=by) as client:
            answers = await asyncio.gather(
                client.generate(generation(f"{way}-1")),
                client.generate(generation(f"{way}-2"), model="alias"),
                client.generate(generation(f"{way}-3"), route_key="k", affinity_key="a"),
            )
            said = await client.chat(CHAT, model="alias")
            parts = client.stream("/generate", generation(f"{way}-4", stream=True))
            body = b"".join([part async for part in parts])
            with pytest.raises(InferenceRoutingError) as unknown:
                await client.generate(generation(f"{way}-5"), model="nobody")
            assert (await client.snapshot())["models"]["m"]["state"] == "READY"
        for n in range(1, 5):
            assert sorted(len(each) for each in await logged(real, f"{way}-{n}")) == [0, 2]
    assert {answer["text"] for answer in answers} == {expected}
    assert _events(body)[-1] == expected
    assert said["model"] == SERVED
    assert unknown.value.status_code == 400
    assert await logged(real, f"{way}-5") == [[], []]


async def test_a_caller_that_leaves_ends_its_request_in_the_engine(
    real: RealGroup, router: RouterAdapter
):
    async with chain(real, router) as front, aiohttp.ClientSession() as session:
        body = generation("gone", 900, stream=True)
        async with session.post(f"{front.url}/rollout/generate", json=body) as answer:
            await answer.content.readany()
            assert sum(await real.group.in_flight()) == 1
        await until(lambda: nothing_is_in_flight(real), 20, "the engine to be idle")
    (events,) = [each for each in await logged(real, "gone") if each]
    assert [e["event"] for e in events] == ["admitted", "ended"]
    assert events[1]["reason"] in ("disconnected", "cancelled")


async def test_what_runs_at_an_update_in_place_ends_behind_the_router_that_is_told_first(
    real: RealGroup, router: RouterAdapter
):
    """As a role does it: out of the router's list, then closed, drained, loaded."""
    async with chain(real, router) as front:
        url = f"{front.url}/rollout/generate"
        running = asyncio.create_task(ask("POST", url, generation("runs", 400)))
        await until(lambda: something_is_in_flight(real), 20, "the engine to run it")
        await router.set_workers([])
        loading = asyncio.create_task(real.group.load_weights(real.operation(1)))
        got = await running
        report = await loading
        await router.set_workers(urls(report))
        newer = await ask("POST", url, generation("newer"))
    assert got.status == 200, got.body
    told = got.json["meta_info"]
    assert (told["finish_reason"]["type"], told["weight_version"]) == ("length", "0")
    assert report.errors() == ()
    assert newer.json["meta_info"]["weight_version"] == "1"


async def something_is_in_flight(real: RealGroup) -> bool:
    return sum(await real.group.in_flight()) > 0


async def nothing_is_in_flight(real: RealGroup) -> bool:
    return not any(await real.group.in_flight())


async def test_engines_that_admit_nobody_say_when_to_ask_again_and_are_asked_once(
    real: RealGroup, router: RouterAdapter
):
    async with chain(real, router) as front:
        await real.group.offload(real.operation())
        before = await refusals(real)
        got = await ask("POST", f"{front.url}/rollout/generate", generation("closed"))
        assert await refusals(real) == before + 1
    assert got.status == 503
    assert got.headers["Retry-After"] == "1"


async def refusals(real: RealGroup) -> int:
    return sum(e["event"] == "refused" for each in await logged(real, "") for e in each)


async def test_requests_with_one_key_reach_one_engine(real: RealGroup, router: RouterAdapter):
    async with chain(real, router, routed=False) as front:
        for key in "abcd":
            for k in range(3):
                await ask(
                    "POST",
                    f"{front.url}/rollout/generate",
                    generation(f"key-{key}-{k}", 1),
                    {"X-SMG-Routing-Key": key},
                )
    used = set[int]()
    for key in "abcd":
        counts = [len(each) for each in await logged(real, f"key-{key}-")]
        assert sorted(counts) == [0, 6], "three requests, admitted and ended, on one of the two"
        used.add(counts.index(6))
    assert used == {0, 1}, "the keys are spread"
