"""The guard of an engine that others launched: its thread, and what passes it on the wire."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.engines import guard as guard_module
from relax_infer.engines.control import EngineControl
from relax_infer.engines.guard import EngineGuard
from relax_infer.engines.request_log import read_request_log
from tests.engines.fake_engine import TOKEN, FakeEngine, Served, served
from tests.gateway.fakes import Say, held_port, until, wire

NOWHERE = "http://127.0.0.1:9"


@asynccontextmanager
async def guard(engine: str, **options: Any) -> AsyncIterator[EngineGuard]:
    """Started, closed, and stopped at the end."""
    made = EngineGuard(engine, **options)
    await aside(made.start)
    try:
        yield made
    finally:
        await aside(made.stop)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    made = FakeEngine()
    async with served(Served(made)) as url:
        made.url = url  # pyright: ignore[reportAttributeAccessIssue]
        yield made


def url_of(engine: FakeEngine) -> str:
    return engine.url  # pyright: ignore[reportAttributeAccessIssue]


async def aside(call: Any, *args: Any) -> Any:
    """What blocks, while the engine in this thread answers."""
    return await asyncio.to_thread(call, *args)


# --- its thread


async def test_it_admits_nobody_until_the_engine_says_that_it_is_idle(engine: FakeEngine):
    async with guard(url_of(engine)) as made:
        assert (await aside(made.status))["backend_drained"] is False
        async with aiohttp.ClientSession(made.url) as client:
            async with client.post("/generate", json={"text": "x"}) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            engine.busy_scheduler = True
            with pytest.raises(RuntimeError, match="not idle"):
                await aside(made.open, TOKEN)
            async with client.get("/health_generate") as answer:
                assert answer.status == 503
            engine.busy_scheduler = False
            await aside(made.open, TOKEN)
            async with client.get("/health_generate") as answer:
                assert answer.status == 200
        assert engine.bodies == []


async def test_of_an_engine_that_does_not_answer_nothing_is_believed():
    async with guard(NOWHERE) as made:
        with pytest.raises(RuntimeError, match="not idle"):
            await aside(made.open, TOKEN)
        assert (await aside(made.status))["engine_idle"] is False


async def test_stop_closes_the_gate_ends_what_runs_and_joins_its_thread(engine: FakeEngine):
    async with guard(url_of(engine)) as made:
        await aside(made.open, TOKEN)
        async with aiohttp.ClientSession(made.url) as client:
            post = asyncio.create_task(client.post("/generate", json={"rid": "r"}))
            await until(lambda: "r" in engine.running)
            await aside(made.stop)
            async with await post as answer:
                assert (await answer.json())["aborted"] is True
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get("/health")
        made.stop()
        with pytest.raises(RuntimeError, match="does not run"):
            made.status()
    assert not [t for t in threading.enumerate() if t.name == "engine guard"]
    assert not engine.running


async def test_a_stop_that_takes_too_long_says_so_with_the_gate_closed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeEngine, "abort", lambda self, rid: None)
    async with guard(url_of(engine)) as made:
        await aside(made.open, TOKEN)
        async with aiohttp.ClientSession(made.url) as client:
            post = asyncio.create_task(client.post("/generate", json={"rid": "r"}))
            await until(lambda: "r" in engine.running)
            with pytest.raises(TimeoutError, match=r"did not end in 0\.2 s"):
                await aside(made.stop, 0.2)
            async with client.get("/health_generate") as answer:
                assert answer.status == 503
            engine.running["r"].set()
            (await post).close()


@pytest.mark.parametrize("stream", [False, True])
async def test_it_ends_though_the_engine_goes_on_with_what_it_was_told_to_abort(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    told: list[str] = []
    monkeypatch.setattr(FakeEngine, "abort", lambda self, rid: told.append(rid))
    monkeypatch.setattr(guard_module, "_ENDING_SECONDS", 0.1)
    async with guard(url_of(engine)) as made:
        await aside(made.open, TOKEN)
        async with aiohttp.ClientSession(made.url) as client:
            body = {"rid": "r", "stream": stream}
            post = asyncio.create_task(client.post("/generate", json=body))
            await until(lambda: "r" in engine.running)
            if stream:
                await post
            await aside(made.stop)
            async with await post as answer:
                if stream:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await answer.read()
                else:
                    assert answer.status == 503
                    assert await answer.json() == {"detail": "The request was aborted"}
    assert told
    assert len(engine.bodies) == 1
    engine.running["r"].set()


def test_a_start_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch):
    async def never(*given: Any) -> None:
        await asyncio.sleep(1)

    monkeypatch.setattr(guard_module, "_started", never)
    made = EngineGuard(NOWHERE)
    with pytest.raises(TimeoutError, match=r"did not start in 0\.1 s"):
        made.start(0.1)
    made.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_it_listens_on_either_kind_of_address_and_takes_any_free_port(host: str):
    async with guard(NOWHERE, host=host) as one, guard(NOWHERE, host=host) as other:
        assert one.url != other.url
        for made in (one, other):
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"{made.url}/health_generate") as answer,
            ):
                assert answer.status == 503


def test_a_port_in_use_is_told_to_whoever_starts_it():
    with held_port() as port:
        made = EngineGuard(NOWHERE, port=port)
        with pytest.raises(PermanentError, match=f"the guard cannot listen on 127.0.0.1:{port}"):
            made.start()
    made.stop()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "http://h:1/path", "http://me@h:1"])
def test_only_an_address_of_a_server_is_guarded(url: str):
    with pytest.raises(PermanentError, match="not the address of an engine"):
        EngineGuard(url)


@pytest.mark.parametrize(
    "stale", [FenceToken(counter=1, grant_id="a"), FenceToken(counter=2, grant_id="z")]
)
async def test_it_opens_and_closes_on_no_lower_or_rival_token(
    engine: FakeEngine, stale: FenceToken
):
    later = FenceToken(counter=2, grant_id="b")
    async with guard(url_of(engine)) as made:
        await aside(made.close, later)
        with pytest.raises(StaleFence):
            await aside(made.open, stale)
        assert (await aside(made.status))["ready"] is False
        await aside(made.open, later)
        for _ in range(2):  # also one that would be a repeat
            with pytest.raises(StaleFence):
                await aside(made.close, stale)
            with pytest.raises(StaleFence):
                await aside(made.open, stale)
            with pytest.raises(StaleFence):
                await aside(made.confirm_drained, stale)
        status = await aside(made.status)
        assert (status["ready"], status["fence"]) == (True, later.model_dump())


async def test_it_drains_what_runs_until_the_deadline(engine: FakeEngine):
    async with guard(url_of(engine)) as made:
        await aside(made.open, TOKEN)
        async with aiohttp.ClientSession(made.url) as client:
            posts = [
                asyncio.create_task(client.post("/generate", json={"rid": rid})) for rid in "rs"
            ]
            await until(lambda: {"r", "s"} <= engine.running.keys())
            await aside(made.close, TOKEN, 0.5)
            engine.running["r"].set()
            async with await posts[0] as answer:
                assert (await answer.json())["aborted"] is False
            async with await posts[1] as answer:
                assert (await answer.json())["aborted"] is True


async def test_its_management_side_is_a_socket_that_fences_by_token(
    engine: FakeEngine, tmp_path: Path
):
    path = tmp_path / "private" / "s"
    async with guard(url_of(engine), socket=path, request_log=tmp_path / "log") as made:
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        control = EngineControl(path)
        with pytest.raises(PermanentError, match="not confirmed drained"):
            await control.open(TOKEN)
        await control.confirm_drained(TOKEN)
        await control.open(TOKEN)
        assert (await aside(made.status))["fence"] == TOKEN.model_dump()
        stale = TOKEN.model_copy(update={"counter": 0})
        with pytest.raises(PermanentError, match="stale"):
            await control.release(("weights",), stale, 10)
        assert engine.seen == []
        await control.release(("weights",), TOKEN, 10)
        assert engine.seen == [("POST", "/release_memory_occupation")]
        assert (await asked(made.url, "/release_memory_occupation"))[0] == 404
        await control.close(TOKEN)
    assert list(read_request_log(tmp_path / "log")) == []


# --- on the wire


async def asked(url: str, path: str = "/generate", **more: Any) -> tuple[int, Any, bytes]:
    """Status, headers and bytes of one request to a guard that is open."""
    given = {"json": {"text": "x", "rid": "r"}, **more}
    async with aiohttp.ClientSession() as client, client.post(url + path, **given) as answer:
        return answer.status, answer.headers, await answer.read()


@asynccontextmanager
async def admitting(engine: str, **options: Any) -> AsyncIterator[str]:
    """A guard that was opened without a look: what is behind it speaks by a script."""
    async with guard(engine, **options) as made:
        assert made._fence is not None
        made._fence.gate.confirm_backend_drained()
        made._fence.gate.open()
        yield made.url


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNAVAILABLE = b'{"detail": "Inference backend is unavailable"}'


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scripted engine is asked beside the requests is not waited for."""
    monkeypatch.setattr(guard_module, "_ENDING_SECONDS", 0.2)


async def test_an_engine_that_refuses_the_connection_is_502():
    async with admitting(NOWHERE) as url:
        status, _, body = await asked(url)
    assert (status, body) == (502, UNAVAILABLE)


@pytest.mark.parametrize(
    "script",
    [
        Say(),
        Say(OK),
        Say(OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nxyz\r\n"),
        Say(OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}"),
        Say(OK + b"content-length: 10\r\n\r\n{}"),
        Say(b"SSH-2.0-OpenSSH\r\n"),
        Say(b"HTTP/1.1 307 Look Elsewhere\r\nlocation: http://other/\r\ncontent-length: 0\r\n\r\n"),
    ],
    ids=["silence", "half a head", "no chunk", "half a chunk", "short", "no http", "redirect"],
)
async def test_an_answer_that_breaks_is_502_and_nothing_is_sent_again(script: Say):
    async with wire(script) as behind:
        async with admitting(behind.url) as url:
            status, _, body = await asked(url)
        assert status == 502
        assert json.loads(body)["detail"].startswith("Inference backend")
        assert len(behind.requests) == 1


async def test_an_engine_that_says_nothing_is_504_and_its_request_is_aborted():
    async with wire(Say(None)) as behind:
        async with admitting(behind.url, timeout=0.2) as url:
            status, _, body = await asked(url)
            await until(lambda: behind.aborts.count("r") > 0)
        assert (status, json.loads(body)) == (504, {"detail": "Inference request timed out"})
        assert (len(behind.requests), behind.closed) == (1, 1)


async def test_a_stream_that_breaks_off_ends_without_an_end_and_is_not_sent_again():
    async with wire(Say(SSE, b"9\r\ndata: 1\r\n\r\n", b"zzz\r\n")) as behind:
        async with admitting(behind.url) as url:
            with pytest.raises(aiohttp.ClientPayloadError):
                await asked(url, json={"text": "x", "rid": "r", "stream": True})
        assert len(behind.requests) == 1


async def test_a_stream_passes_byte_for_byte_as_it_comes():
    go = asyncio.Event()
    parts = [b"data: {}\r\n\r\n", b": ping\n\n", b"data: \xff\x00[DONE]\r\n\r\n"]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    script = Say(SSE, chunks[0], go, *chunks[1:], b"0\r\n\r\n")
    async with wire(script) as behind, admitting(behind.url) as url:
        body = {"text": "x", "rid": "r", "stream": True}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/generate", json=body) as answer,
        ):
            assert await answer.content.readexactly(len(parts[0])) == parts[0]
            go.set()
            assert await answer.content.read() == b"".join(parts[1:])
            assert answer.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_s_own_errors_and_their_retry_after_reach_the_caller(stream: bool):
    said = b'{"error": {"message": "queue is full"}}'
    head = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-type: application/json\r\n"
    script = Say(head + b"content-length: %d\r\n\r\n%s" % (len(said), said))
    async with wire(script) as behind, admitting(behind.url) as url:
        given = {"text": "x", "rid": "r", "stream": stream}
        status, headers, body = await asked(url, json=given)
    assert (status, headers["retry-after"], body) == (503, "7", said)


async def test_headers_of_one_hop_and_the_fence_s_own_stay_here_and_the_key_is_the_guard_s():
    answer = OK + b"connection: x-mine\r\nx-mine: 1\r\nx-yours: 2\r\ncontent-length: 2\r\n\r\n{}"
    async with wire(Say(answer)) as behind:
        async with admitting(behind.url, key="the-engine's") as url:
            sent = {
                **{"x-relax-fence": "9:z", "authorization": "Bearer mine", "te": "gzip"},
                **{"x-smg-routing-key": "k", "x-request-id": "q"},
            }
            _, headers, _ = await asked(url, headers=sent)
        (request,) = behind.requests
    head = request.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nauthorization: bearer the-engine's" in head
    assert head.count(b"authorization") == 1
    for dropped in (b"x-relax-fence", b"\r\nte:", b"accept-encoding"):
        assert dropped not in head
    assert b"\r\nx-smg-routing-key: k" in head
    assert b"\r\nx-request-id: q" in head
    assert "x-mine" not in headers
    assert headers["x-yours"] == "2"


async def test_a_payload_without_an_id_gets_one_at_its_end_and_is_else_what_it_was():
    given = b'{"text":  "x", "n": 12345678901234567890}\n'
    async with (
        wire(Say(OK + b"content-length: 2\r\n\r\n{}")) as behind,
        admitting(behind.url) as url,
    ):
        await asked(url, json=None, data=given)
    body = behind.requests[0].partition(b"\r\n\r\n")[2]
    assert body.startswith(b'{"text":  "x", "n": 12345678901234567890, "rid": "guard-')


async def test_a_private_id_that_comes_in_two_pieces_is_named_back(engine: FakeEngine):
    """Where an engine's event is cut on its way is nobody's choice."""
    go, second = asyncio.Event(), asyncio.Event()
    private: list[bytes] = []
    mine: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        rid = json.loads((await receive())["body"]).get("rid", "").encode()
        (private if rid.startswith(b"fence-") else mine).append(rid)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if rid.startswith(b"fence-"):
            for part in (b'{"id": "' + rid[:9], rid[9:] + b'"} fen', b"ce"):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0.05)
        else:
            second.set()
            await go.wait()
        await send({"type": "http.response.body", "body": b"! f"})

    async with served(app) as behind, admitting(behind) as url:
        first = asyncio.create_task(asked(url, json={"rid": "r1", "stream": True}))
        await second.wait()
        _, _, body = await asked(url, json={"rid": "r10", "stream": True})
        go.set()
        await first
    assert body == b'{"id": "r10"} fence! f'
    assert len(private) == 1
