"""A caller, the gateway, a real router and two real fenced SGLang engines, one behind the other."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_infer.engines import RouterAdapter, read_request_log
from tests.e2e.looking import until
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
    real: RealGroup, router: RouterAdapter, *, routed: bool = True
) -> AsyncIterator[Gateway]:
    """The gateway before engines that are awake, behind the router or directly."""
    engines = urls(await real.ready(0))
    await router.set_workers(engines)
    route = {"route_mode": "SGLANG_ROUTER", "router_url": router.url} if routed else {}
    async with gateway(rollout_router=router.url) as front:
        front.publish("rollout", *engines, served_model_name=SERVED, **route)
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
    assert events[0] == events[1]
    assert len(events[0]) >= 6
    assert through.endswith(b"data: [DONE]\n\n")


def _events(body: bytes) -> list[str]:
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: {")]
    return [json.loads(line)["text"] for line in lines]


async def test_chat_is_rendered_by_the_engine_s_own_template(
    real: RealGroup, router: RouterAdapter
):
    async with chain(real, router) as front:
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
