"""An engine that somebody else started, over HTTP: what it must say before it is called."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from relax_infer.contracts.external import ExternalAsk, ExternalWatch
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.engines import EngineGuard, external

RUN = RunRef(run="run-1", store="memory://store")
NEXT = WeightsRef(version=3, uri="file:///weights/3", digest="files")


class Server:
    """Answers as SGLang 0.5.23 does."""

    def __init__(self) -> None:
        self.version, self.digest = "2", "two"
        self.loads_as = "three"
        """Digest after whatever is loaded."""
        self.log_prob: Any = -1.5
        self.running = [0]
        self.broken = ""
        """A path that answers 500."""
        self.asked: list[tuple[str, Any]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        if request.path == self.broken:
            return web.Response(status=500, text="CUDA error")
        match request.path:
            case "/health":
                return web.Response()
            case "/model_info":
                told = {"model_path": "/m", "weight_version": self.version}
                return web.json_response(told)
            case "/weights_checker":
                rank = {"per_gpu_checksum": self.digest}
                return web.json_response({"ranks": [rank], "per_engine_checksum": "both"})
            case "/update_weights_from_disk":
                self.version, self.digest = body["weight_version"], self.loads_as
                return web.json_response({"success": True})
            case "/generate":
                rows = [[None, 1, None], *([self.log_prob, 2, None] for _ in range(7))]
                return web.json_response({"meta_info": {"input_token_logprobs": rows}})
            case "/v1/loads":
                left = self.running.pop(0) if len(self.running) > 1 else self.running[0]
                load = {"num_running_reqs": left, "num_waiting_reqs": left}
                return web.json_response({"loads": [load]})
            case _:
                return web.Response(status=404)

    def did(self) -> list[str]:
        return [path for path, _ in self.asked]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    async with TestServer(app) as running:
        made.url = str(running.make_url("")).rstrip("/")
        yield made


def ask(server: Server, **fields: Any) -> ExternalAsk:
    document = {"run": RUN, "model": "policy", "url": server.url, "timeout": 5.0}
    return ExternalAsk.model_validate({**document, **fields})


async def test_a_first_look_loads_and_generates_nothing(server: Server):
    told = await external.check(ask(server))
    assert (told.answers, told.right, told.weight_version) == (True, False, 2)
    assert server.did() == ["/health", "/model_info"]


async def test_the_right_weights_are_read_and_not_loaded_again(server: Server):
    weights = WeightsRef(version=2, uri="/weights/2", digest="files")
    told = await external.check(ask(server, weights=weights, digest="two"))
    assert told.right, told.error
    assert (told.weight_version, told.weights_digest) == (2, "two")
    assert "/update_weights_from_disk" not in server.did()
    assert server.did()[-1] == "/generate"


async def test_other_weights_are_replaced_and_read_back(server: Server):
    told = await external.check(ask(server, weights=NEXT, digest="three"))
    assert told.right, told.error
    ((_, body),) = [each for each in server.asked if each[0] == "/update_weights_from_disk"]
    assert (body["model_path"], body["weight_version"]) == ("/weights/3", "3")


async def test_right_bytes_under_another_version_are_loaded_too(server: Server):
    """Callers read the version of an answer."""
    server.digest = "three"
    told = await external.check(ask(server, weights=NEXT, digest="three"))
    assert told.right
    assert told.weight_version == 3


async def test_weights_that_never_change_are_compared_only(server: Server):
    assert (await external.check(ask(server, digest="two"))).right
    told = await external.check(ask(server, digest="other"))
    assert not told.right
    assert told.error == "it holds weights two, its siblings other"
    assert "/update_weights_from_disk" not in server.did()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"loads_as": "rubbish"}, "it holds weights rubbish, its siblings three"),
        ({"log_prob": float("nan")}, "numbers were due"),
        ({"log_prob": None}, "numbers were due"),
        ({"broken": "/weights_checker"}, "answered 500: CUDA error"),
        ({"broken": "/update_weights_from_disk"}, "answered 500"),
    ],
)
async def test_what_is_not_right_is_told(server: Server, change: dict[str, Any], told: str):
    for name, value in change.items():
        setattr(server, name, value)
    report = await external.check(ask(server, weights=NEXT, digest="three"))
    assert report.answers
    assert not report.right
    assert told in (report.error or "")


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1/path", "http://me@127.0.0.1:1"])
async def test_only_an_address_of_a_server_is_asked(server: Server, url: str):
    report = await external.check(ask(server, url=url))
    assert not report.answers
    assert report.error == "it is no http://host:port"


async def test_a_guard_in_front_of_it_is_named_as_what_hides_its_weights(server: Server):
    guard = EngineGuard(server.url)
    await asyncio.to_thread(guard.start)
    try:
        report = await external.check(ask(server, url=guard.url))
    finally:
        await asyncio.to_thread(guard.stop)
    assert (report.answers, report.right) == (False, False)
    assert "as a guard or a fence hides it" in (report.error or "")
    assert "the address of the engine itself" in (report.error or "")


async def test_nobody_who_answers_is_no_engine(server: Server):
    report = await external.check(ask(server, url="http://127.0.0.1:9"))
    assert not report.answers
    assert "no answer" in (report.error or "")
    server.broken = "/health"
    assert not (await external.check(ask(server))).answers


async def test_it_is_idle_when_nothing_runs_and_nothing_waits(server: Server):
    server.running = [2, 0]
    assert await external.wait_idle(server.url, 30.0) == 0
    server.running = [3]
    assert await external.wait_idle(server.url, 0.0) == 6
    with pytest.raises(TransientError):
        await external.wait_idle("http://127.0.0.1:9", 1.0)


async def test_the_watch_ends_with_what_was_lost_and_why(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(external, "LOOK_SECONDS", 0.01)
    asked = ExternalWatch(run=RUN, versions={server.url: 1}, patience=0.0)
    assert await external.watch(asked) == {server.url: "somebody else loaded version 2 over 1"}
    static = asked.model_copy(update={"compares": False})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(external.watch(static), 0.2)
    gone = ExternalWatch(run=RUN, versions={"http://127.0.0.1:9": 2}, patience=0.0)
    (why,) = (await external.watch(gone)).values()
    assert "no answer" in why
