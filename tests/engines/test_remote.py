"""An engine that is asked over HTTP: ids that it will have, how busy it is, what is left to it."""

import asyncio
import json
from typing import Any

import pytest

from relax_infer.engines import remote
from relax_infer.engines._call import _beginning
from relax_infer.engines._named import ids_in, named
from relax_infer.engines._pauses import SELDOM_SECONDS
from relax_infer.engines.loads import requests_of
from relax_infer.engines.remote import RemoteEngine
from tests.engines.fake_engine import FakeEngine, Served, served
from tests.gateway.fakes import until


@pytest.mark.parametrize(
    ("payload", "rids"),
    [
        ({"rid": "x", "text": "a"}, ("x",)),
        ({"rid": "x", "text": ["a", "b"]}, ("x_0", "x_1")),
        ({"rid": ["x", "y"], "text": ["a", "b"]}, ("x", "y")),
        ({"rid": "x", "input_ids": [1, 2]}, ("x",)),
        ({"rid": "x", "input_ids": [[1, 2], [3]]}, ("x_0", "x_1")),
        ({"rid": "x", "input_embeds": [[0.5, 1.0]]}, ("x",)),
        ({"rid": "x", "input_embeds": [[[0.5]], [[1.0]]]}, ("x_0", "x_1")),
        ({"rid": "x", "prompt": ["a", "b", "c"]}, ("x_0", "x_1", "x_2")),
        ({"rid": "x", "prompt": [1, 2]}, ("x",)),
        ({"rid": "x", "messages": []}, ("x",)),
        ({"rid": 7, "text": "a"}, ()),
    ],
)
def test_the_ids_of_a_payload_are_those_that_sglang_makes_of_it(payload: Any, rids: Any):
    body = json.dumps(payload).encode()
    assert named(body) == remote.Named(body, rids)


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"text": "a"}', b' {"text": "a"}\r\n', b"{}", b'{"text": "a", "rid": null}'),
        *(b'{"rid": "", "text": "a"}', '{"text": "a"}'.encode("utf-16-be")),
        *('{"text": "a\u2713"}'.encode(), '{"text": "a"}'.encode("utf-16")),
    ],
)
def test_what_has_no_id_gets_one_and_says_else_the_same(body: bytes):
    sent = named(body)
    told = json.loads(sent.body)
    assert sent.rids == (told.pop("rid"),)
    assert sent.rids[0].startswith("guard-")
    assert told == {k: v for k, v in json.loads(body).items() if k != "rid"}
    assert named(body).rids != sent.rids


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 100_000, b'"x"', b"\xff"])
def test_what_is_no_object_is_passed_on_as_it_is(body: bytes):
    assert named(body) == remote.Named(body)


def test_samples_are_known_by_what_a_stream_tells():
    body = b'{"rid": "x", "stream": true, "sampling_params": [{"n": 1}, {"n": 2}]}'
    assert (named(body).stream, named(body).samples) == (True, True)
    assert named(b'{"n": 2}').samples
    assert not named(b'{"sampling_params": {"n": 1}}').samples
    assert ids_in(b'data: {"meta_info": {"id":"a1", "x": 1}}\n\ndata: {"id": "b2"}') == ["a1", "b2"]


def test_only_what_may_become_a_private_id_is_held_back():
    names = ["fence-ab", "fence-cd"]
    for body, held in (
        (b"x fence-a", 7),
        (b"x f", 1),
        (b"fence-c", 7),
        (b"x fence-x", 0),
        (b"", 0),
    ):
        assert (body, _beginning(body, names)) == (body, held)


TODAY = {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}] * 2}
EARLIER = [{"num_reqs": 3, "num_waiting_reqs": 2}, {"num_reqs": 1, "num_waiting_reqs": 0}]


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        ({"/v1/loads": TODAY}, 6),
        ({"/get_load": EARLIER}, 4),
        ({"/get_server_info": {"internal_states": [{"load": 0}, {"load": 0}]}}, 0),
        ({"/get_server_info": {"internal_states": [{"load": 17}]}}, 17),
        ({"/get_server_info": {"internal_states": [{"load": {"num_reqs": 2}}]}}, 2),
        ({"/get_server_info": {"internal_states": [{}]}}, None),
        ({"/v1/loads": {"loads": []}}, None),
        ({"/v1/loads": []}, None),
        ({}, None),
    ],
)
async def test_how_busy_it_is_is_what_it_says_and_else_not_known(
    answers: dict[str, Any], count: int | None
):
    async def ask(method: str, path: str) -> tuple[int, bytes]:
        assert method == "GET"
        return (200, json.dumps(answers[path]).encode()) if path in answers else (404, b"{}")

    assert await requests_of(ask) == count


@pytest.mark.parametrize("status", [0, 500, 401])
async def test_an_engine_that_does_not_answer_well_is_not_called_idle(status: int):
    async def ask(method: str, path: str) -> tuple[int, bytes]:
        return status, json.dumps(EARLIER).encode()

    assert await requests_of(ask) is None


async def answer_of(engine: RemoteEngine, path: str, body: bytes = b"", method: str = "POST"):
    """Status and body, as an app."""
    told: list[Any] = []
    parts = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Any) -> None:
        told.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await engine(scope, receive, send)
    return told[0]["status"], b"".join(each.get("body", b"") for each in told[1:])


async def test_what_it_says_of_itself_is_asked_by_its_earlier_name_too():
    asked: list[str] = []

    async def earlier(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        status = 200 if scope["path"].startswith("/get_") else 404
        await FakeEngine()._reply(send, status, {"model_path": "m"})

    async with served(earlier) as url:
        engine = RemoteEngine(url)
        for path in ("/server_info", "/model_info"):
            status, body = await answer_of(engine, path, method="GET")
            assert (status, json.loads(body)) == (200, {"model_path": "m"})
        await engine.close()
    assert asked == ["/server_info", "/get_server_info", "/model_info", "/get_model_info"]


async def test_a_request_whose_end_was_not_seen_is_kept_and_aborted_until_it_is_in_its_scheduler(
    monkeypatch: pytest.MonkeyPatch,
):
    """The engine reads it late; nobody waits for it, and no connection tells when it ends."""
    monkeypatch.setattr(remote, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(remote, "ABORT_AGAIN_SECONDS", 0.01)
    fake = FakeEngine()
    fake.deaf_until_started.clear()

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/generate":
            await Served(fake)(scope, receive, send)
            return
        await fake(scope, receive, send)

    async with served(stubborn) as url:
        engine = RemoteEngine(url, timeout=0.1)
        status, _ = await answer_of(engine, "/generate", b'{"rid": "r"}')
        assert status == 504
        assert engine.request_ids() == ["r"]
        fake.deaf_until_started.set()
        await until(lambda: fake.aborted == ["r"])
        await until(lambda: engine.request_ids() == [])
        assert fake.bodies == [b'{"rid": "r"}']
        await engine.close()


async def test_what_was_left_is_not_aborted_any_more_once_that_would_end_another(
    monkeypatch: pytest.MonkeyPatch,
):
    """SGLang aborts by prefix: the abort of r1, again and again, would take r10 with it."""
    monkeypatch.setattr(remote, "ABORT_AGAIN_SECONDS", 0.01)
    fake, told = FakeEngine(), list[str]()

    async def engine_app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/abort_request":
            told.append(json.loads((await receive())["body"])["rid"])
            await fake._reply(send, 200, {})
        else:
            await fake(scope, receive, send)

    async with served(engine_app) as url:
        engine = RemoteEngine(url, timeout=1.0)
        fake.deaf_until_started.clear()
        assert (await answer_of(engine, "/generate", b'{"rid": "r1"}'))[0] == 504
        await until(lambda: told.count("r1") > 2)
        fake.deaf_until_started.set()
        ten = asyncio.create_task(answer_of(engine, "/generate", b'{"rid": "r10"}'))
        await until(lambda: "r10" in fake.running)
        await until(lambda: not engine._aborts)
        assert engine.request_ids() == ["r1", "r10"]
        fake.running["r10"].set()
        assert json.loads((await ten)[1]) == {"rid": "r10", "aborted": False}
        await engine.close()


async def test_an_id_of_somebody_else_is_not_aborted_for_whoever_took_it_too():
    fake = FakeEngine()
    async with served(Served(fake)) as url:
        engine = RemoteEngine(url)
        one = asyncio.create_task(answer_of(engine, "/generate", b'{"rid": "r"}'))
        await until(lambda: "r" in fake.running)
        status, _ = await answer_of(engine, "/generate", b'{"rid": "r"}')
        assert status == 400
        assert engine.request_ids() == ["r"]
        fake.running["r"].set()
        assert json.loads((await one)[1]) == {"rid": "r", "aborted": False}
        assert engine.request_ids() == []
        assert fake.aborted == []
        await engine.close()


async def test_an_engine_that_goes_on_is_told_ever_more_seldom_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(remote, "_sleep", sleep)
    fake, told = FakeEngine(), list[str]()

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/abort_request":
            told.append(json.loads((await receive())["body"])["rid"])
            await fake._reply(send, 200, {})
        else:
            await fake(scope, receive, send)

    async with served(stubborn) as url:
        engine = RemoteEngine(url)
        one = asyncio.create_task(answer_of(engine, "/generate", b'{"rid": "r"}'))
        await until(lambda: "r" in fake.running)
        engine.abort_all()
        await until(lambda: len(slept) > 15)
        fake.running["r"].set()
        assert (await one)[0] == 200
        await until(lambda: not engine._aborts)
        await engine.close()
    assert slept == sorted(slept)
    assert (slept[0], slept[-1]) == (remote.ABORT_AGAIN_SECONDS, SELDOM_SECONDS)
    (said,) = [each for each in caplog.messages if "goes on with it" in each]
    assert "10 times to abort r" in said


async def test_an_engine_that_does_not_obey_is_told_of_once(caplog: pytest.LogCaptureFixture):
    async def keyed(scope: Any, receive: Any, send: Any) -> None:
        await FakeEngine()._reply(send, 401, {"error": "Unauthorized"})

    async with served(keyed) as url:
        engine = RemoteEngine(url)
        assert await engine._tell("a") is False
        assert await engine._tell("b") is False
        assert not await engine.idle()
        assert not await engine.flush()
        await engine.close()
    (said,) = [each for each in caplog.messages if "answered the abort" in each]
    assert "401" in said
