"""The gateway's client for backends, on both event loops: the gateway runs on uvloop."""

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from relax_infer.gateway import _aborts, _answers, _connection, _pool
from relax_infer.gateway._answers import Exchange, answer_of, whole_of
from relax_infer.gateway._connection import Broken
from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._upstream import Upstream
from tests.gateway.fakes import until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Test = Callable[[], Coroutine[Any, Any, None]]

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return request.param


class Backend:
    """What one upstream saw: requests, connections, and hang-ups by the client."""

    def __init__(self) -> None:
        self.url = ""
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = self.lost = 0


@contextlib.asynccontextmanager
async def backend(*answers: bytes | asyncio.Event) -> AsyncIterator[Backend]:
    """Answers every request alike, part by part; an event is waited for."""
    state = Backend()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                state.bodies.append(await reader.readexactly(length))
                state.heads.append(head)
                for part in answers:
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await part.wait()
        state.lost += 1

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def whole(client: Upstream, to: Backend, body: bytes = b"{}") -> bytes:
    answer = await client.post(to.url, "/generate", [(b"x-a", b"1")], body)
    try:
        return await answer.read()
    finally:
        answer.close()


def test_a_connection_is_used_again_until_the_backend_says_it_closes(run: Any) -> None:
    async def test() -> None:
        client = Upstream(4)
        async with backend(OK) as kept:
            for _ in range(3):
                assert await whole(client, kept) == b"{}"
            assert (kept.connections, len(kept.heads)) == (1, 3)
        closing = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        async with backend(closing) as leaving:
            for _ in range(3):
                assert await whole(client, leaving) == b"{}"
            assert leaving.connections == 3
        await client.close()

    run(test())


def test_a_request_is_written_as_it_is_said_and_a_header_cannot_make_another(run: Any) -> None:
    async def test() -> None:
        client = Upstream(4)
        async with backend(OK) as to:
            body = bytes(range(256)) * 4096
            await whole(client, to, body)
            assert to.bodies == [body]
            host = to.url.removeprefix("http://").encode()
            assert to.heads[0].split(b"\r\n") == [
                *(b"POST /generate HTTP/1.1", b"host: " + host, b"content-length: 1048576"),
                *(b"x-a: 1", b"", b""),
            ]
            for bad in (b"1\r\nx: 2", b"1\n", b"1\r", b"\0"):
                with pytest.raises(GatewayError) as raised:
                    await client.post(to.url, "/generate", [(b"x", bad)], b"{}")
                assert raised.value.status == 502
            assert len(to.heads) == 1
        await client.close()

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Switch\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * _connection.MAX_HEAD,
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: %s\r\n\r\n{}" % (b"y" * _connection.MAX_HEAD),
        b"HTTP/1.1 102 Processing\r\n\r\n" * 4000,
    ],
)
def test_where_an_answer_ends_is_never_guessed(run: Any, answer: bytes) -> None:
    async def test() -> None:
        client = Upstream(4)
        async with backend(answer) as to:
            with pytest.raises((GatewayError, Broken)):
                await whole(client, to)
            await until(lambda: to.lost == 1)
            assert len(to.heads) == 1
        await client.close()

    run(test())


def test_interim_answers_and_trailers_are_passed_over(run: Any) -> None:
    async def test() -> None:
        client = Upstream(4)
        chunked = (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=1\r\n{}\r\n0\r\nx: y\r\n\r\n"
        )
        async with backend(b"HTTP/1.1 100 Continue\r\n\r\n", chunked) as to:
            answer = await client.post(to.url, "/generate", [], b"{}")
            assert (answer.status, await answer.read()) == (200, b"{}")
            assert answer.headers == [(b"transfer-encoding", b"chunked")]
            assert (await whole(client, to), to.connections) == (b"{}", 1)
        await client.close()

    run(test())


def test_bytes_that_nobody_asked_for_end_the_connection_and_are_nobody_s_answer(run: Any) -> None:
    async def test() -> None:
        client = Upstream(4)
        async with backend(OK + OK.replace(b"{}", b"[]")) as to:
            for _ in range(3):
                assert await whole(client, to) == b"{}"
            assert to.connections == 3
        await client.close()

    run(test())


def test_a_reader_that_stops_makes_the_backend_wait(run: Any) -> None:
    async def test() -> None:
        client = Upstream(4)
        size, written = 64 << 20, 0
        stop = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            with contextlib.suppress(ConnectionError):
                while written < size:
                    writer.write(b"x" * 65536)
                    written += 65536
                    await writer.drain()
            await stop.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answer = await client.post(url, "/generate", [], b"{}")
        before = -1
        while before != written:  # until the backend is stuck
            before = written
            await asyncio.sleep(0.2)
        assert before < size / 2
        got = 0
        while chunk := await answer.read_some():
            got += len(chunk)
            assert len(chunk) <= _connection.HIGH_WATER * 3
        assert got == size
        answer.close()
        stop.set()
        server.close()
        await client.close()

    run(test())


def test_no_more_requests_than_the_limit_are_under_way_and_all_get_their_turn(run: Any) -> None:
    async def test() -> None:
        client = Upstream(2)
        go = asyncio.Event()
        async with backend(go, OK) as first, backend(OK) as other:
            asked = [asyncio.create_task(whole(client, first)) for _ in range(5)]
            await until(lambda: len(first.heads) == 2)
            waiting = asyncio.create_task(whole(client, other))
            gave_up = asyncio.create_task(whole(client, other))
            await asyncio.sleep(0.05)
            assert (len(first.heads), other.connections) == (2, 0)
            gave_up.cancel()
            await asyncio.gather(gave_up, return_exceptions=True)
            go.set()
            assert await asyncio.gather(*asked, waiting) == [b"{}"] * 6
            assert first.connections + other.connections <= 4
        await client.close()

    run(test())


def test_an_idle_connection_is_hung_up_before_the_backend_would(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pool, "KEEP_ALIVE", 0.1)

    async def test() -> None:
        client = Upstream(4)
        async with backend(OK) as to:
            await whole(client, to)
            await until(lambda: to.lost == 1)
            await whole(client, to)
            assert to.connections == 2
        await client.close()

    run(test())


def test_whoever_is_interrupted_hangs_up_and_gives_its_turn_back(run: Any) -> None:
    async def test() -> None:
        client = Upstream(1)
        never = asyncio.Event()
        async with backend(never) as silent, backend(OK) as to:
            for _ in range(3):
                asked = asyncio.create_task(whole(client, silent))
                seen = len(silent.heads) + 1
                await until(lambda seen=seen: len(silent.heads) == seen)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            assert await whole(client, to) == b"{}"
            never.set()
            await until(lambda: silent.lost == 3)
        await client.close()

    run(test())


def test_aborts_take_no_turns_of_requests_and_are_few_at_once(run: Any) -> None:
    async def test() -> None:
        client = Upstream(1)
        go, rids = asyncio.Event(), [f"r{n}" for n in range(300)]
        async with backend(go, OK) as busy, backend(OK) as engine, backend(go, OK) as slow:
            asked = asyncio.create_task(whole(client, busy))
            await until(lambda: len(busy.heads) == 1)  # the only turn
            client.abort([engine.url], rids)
            await until(lambda: len(engine.bodies) == 300)
            assert {json.loads(body)["rid"] for body in engine.bodies} == set(rids)
            assert engine.connections <= _aborts.AT_ONCE
            client.abort([slow.url, engine.url], rids)
            await until(lambda: len(slow.heads) == _aborts.AT_ONCE)
            assert slow.connections == _aborts.AT_ONCE
            go.set()
            await until(lambda: (len(slow.heads), len(engine.heads)) == (300, 600))
            assert await asked == b"{}"
        await client.close()

    run(test())


async def test_of_too_many_aborts_the_oldest_are_dropped_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_aborts, "WAITING", 100)
    client = Upstream(1)
    async with backend(OK) as engine:
        client.abort([engine.url], [f"r{n}" for n in range(300)])
        await until(lambda: len(engine.bodies) == 100)
        assert {json.loads(body)["rid"] for body in engine.bodies} == {
            f"r{n}" for n in range(200, 300)
        }
        await client.close()
    assert "200 aborts were dropped" in caplog.text


async def test_an_encoded_body_that_comes_to_too_much_is_502(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_answers, "_DECODED_BODY", 1000)
    headers = [(b"content-encoding", b"gzip")]
    just = b'"%b"' % (b"x" * 998)
    assert whole_of(200, headers, gzip.compress(just)).body == just
    with pytest.raises(GatewayError, match="too large"):
        whole_of(200, headers, gzip.compress(just + b" "))


def test_a_backend_that_is_not_there_is_502(run: Any) -> None:
    async def test() -> None:
        client = Upstream(1)
        for url in ("http://127.0.0.1:1", "http://no-such-host.invalid:1", "http://[::1]:1"):
            with pytest.raises(GatewayError) as raised:
                await client.post(url, "/generate", [], b"{}")
            assert raised.value.status == 502
        await client.close()

    run(test())


RAW = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize(
    ("encoding", "body", "plain"),
    [
        (b"gzip", gzip.compress(b'{"a": 1}'), b'{"a": 1}'),
        (b"GZIP", gzip.compress(b'{"a": 1}'), b'{"a": 1}'),
        (b"deflate", zlib.compress(b'{"a": 1}'), b'{"a": 1}'),
        (b"deflate", RAW.compress(b'{"a": 1}') + RAW.flush(), b'{"a": 1}'),
        (b"identity", b"{}", b"{}"),
        (b"gzip", b"{}", None),
        (b"gzip", gzip.compress(b'{"a": 1}')[:-9], None),
        (b"br", b"{}", None),
    ],
)
async def test_a_whole_answer_s_encoding_is_undone_or_it_is_502(
    encoding: bytes, body: bytes, plain: bytes | None
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %b\r\ncontent-length: %d\r\n\r\n"
    client = Upstream(1)
    async with backend(head % (encoding, len(body)) + body) as to:
        response = await client.post(to.url, "/generate", [], b"{}")
        if plain is None:
            with pytest.raises(GatewayError) as raised:
                await answer_of(response, Exchange(), stream=False)
            assert raised.value.status == 502
        else:
            answer = await answer_of(response, Exchange(), stream=False)
            assert answer.body == plain
            assert b"content-encoding" not in dict(answer.headers)
        response.close()
    await client.close()
