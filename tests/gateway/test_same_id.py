"""Two callers may use one id: whoever leaves ends nobody else's request."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relax_infer.gateway import _aborts
from relax_infer.gateway._upstream import Upstream
from tests.gateway.fakes import engine, gateway, until

SAME: dict[str, Any] = {"text": "x", "rid": "r"}


async def echo(request: web.Request, payload: dict[str, Any]) -> web.Response:
    return web.json_response({"text": "ok"})


class Waiting:
    """Answers each request when it is told to."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Event] = []

    async def __call__(self, request: web.Request, payload: dict[str, Any]) -> web.Response:
        go = asyncio.Event()
        self.asked.append(go)
        await go.wait()
        return web.json_response({"text": "ok"})


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("path", ["generate", "v1/chat/completions"])
async def test_behind_a_router_a_caller_that_leaves_ends_no_other_of_the_same_id(
    direct: bool, path: str
) -> None:
    """The id is aborted at every engine, and is another's at one of them."""
    source = Waiting()
    payload = SAME if path == "generate" else {"messages": [], "rid": "r"}
    async with (
        gateway(direct=direct) as front,
        engine(source) as router,
        engine(echo) as first,
        engine(echo) as second,
        aiohttp.ClientSession() as session,
    ):
        routed = {"route_mode": "SGLANG_ROUTER", "router_url": router.url}
        front.publish("rollout", first.url, second.url, **routed)
        url = f"{front.url}/rollout/{path}"
        mine = asyncio.create_task(session.post(url, json=payload))
        await until(lambda: len(source.asked) == 1)
        other = asyncio.create_task(session.post(url, json=payload))
        await until(lambda: len(source.asked) == 2)
        other.cancel()
        await until(lambda: router.closed == ["r"])
        # An abort that was to be sent would have come before this one.
        third = asyncio.create_task(session.post(url, json=payload | {"rid": "s"}))
        await until(lambda: len(source.asked) == 3)
        third.cancel()
        await until(lambda: first.aborts == second.aborts == ["s"])
        source.asked[0].set()
        assert (await mine).status == 200
        # Now nobody waits for what the other may have left at an engine.
        await until(lambda: first.aborts == second.aborts == ["s", "r"])


async def test_an_abort_that_waits_does_not_end_the_repeat_of_what_was_given_up() -> None:
    client = Upstream(1)
    async with engine(echo) as upstream:
        client.hold(["r", "s"])
        client.let_go(["r", "s"])
        client.abort([upstream.url], ["r", "s"])  # its senders have not begun
        client.hold(["r"])
        await until(lambda: upstream.aborts == ["s"])
        await client.close()
        assert upstream.aborts == ["s"]


async def test_every_id_is_let_go_as_often_as_it_was_held() -> None:
    sent: list[tuple[str, str]] = []

    async def send(engine: str, rid: str) -> None:
        sent.append((engine, rid))

    aborts = _aborts.Aborts(send)
    for _ in range(2):
        aborts.hold(["a", "a", "b"])
    aborts.let_go(["a", "a", "b"])
    aborts.put(["one", "two"], ["a", "b"])
    await asyncio.sleep(0)
    assert sent == []
    aborts.let_go(["a", "a", "b"])
    await aborts.close()
    assert sorted(sent) == [("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")]
    assert aborts._live == aborts._owed == {}


@pytest.mark.parametrize("direct", [False, True])
async def test_nothing_is_kept_of_ids_of_requests_that_ended(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[_aborts.Aborts] = []
    made = _aborts.Aborts.__init__

    def note(self: _aborts.Aborts, *given: Any) -> None:
        made(self, *given)
        held.append(self)

    monkeypatch.setattr(_aborts.Aborts, "__init__", note)
    async with gateway(direct=direct) as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        url = f"{front.url}/genrm/generate"
        async with aiohttp.ClientSession() as session:
            for body in (SAME, {"rid": ["a", "b", "a"], "text": ["x"] * 3}, {"text": "x"}):
                async with session.post(url, data=json.dumps(body)) as answer:
                    assert answer.status == 200
            front.publish("genrm", "http://127.0.0.1:9", term=2)
            async with session.post(url, data=json.dumps(SAME)) as answer:
                assert answer.status == 502
    assert held
    assert all(each._live == each._owed == {} for each in held)
