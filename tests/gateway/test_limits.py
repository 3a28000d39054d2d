"""What a head may take, however it comes, and how long a caller may keep a connection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from relax_infer.gateway import _protocol
from relax_infer.gateway._connection import Broken, Connection, Response
from tests.gateway.fakes import Engine, Gateway, engine, gateway, until
from tests.gateway.test_framing import GOOD, chunks, everything, request, statuses
from tests.gateway.test_gateway import echo


@pytest.fixture(params=[True, False], ids=["direct", "app"])
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with gateway(direct=request.param) as made:
        yield made


@pytest.fixture
async def upstream(front: Gateway) -> AsyncIterator[Engine]:
    async with engine(echo) as made:
        front.publish("teacher", made.url)
        yield made


NOT_SENT_ON = b"connection: close, x-a, a"
"""What it names stays with the gateway."""


async def in_pieces(front: Gateway, *pieces: bytes) -> list[int]:
    """Statuses of what is answered to bytes that the server reads in just these pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    await until(lambda: len(front.connections) == 1)
    (protocol,) = front.connections
    for piece in pieces:
        protocol.data_received(piece)
    try:
        return statuses(await asyncio.wait_for(reader.read(), 20))
    finally:
        writer.close()
        await until(lambda: not front.connections)


async def test_only_a_head_counts_towards_its_limit_and_not_what_came_in_one_piece_with_it(
    front: Gateway, upstream: Engine
) -> None:
    large = b'{"text": "%b"}' % (b"x" * 200_000)
    begun = request(body=large)
    for length in (60, 60_000, 65_400):
        last = request(b"x-a: " + b"y" * length, NOT_SENT_ON)
        for cut in (1, 25, len(last) - len(GOOD) - 10):
            pieces = (begun[:-150_000], begun[-150_000:] + last[:cut], last[cut:])
            assert await in_pieces(front, *pieces) == [200, 200]
            dropped = request(body=large).replace(b"/teacher", b"/nowhere")
            pieces = (dropped[:-150_000], dropped[-150_000:] + last[:cut], last[cut:])
            assert await in_pieces(front, *pieces) == [404, 200]


@pytest.mark.parametrize("size", [1000, 65_000, 400_000])
async def test_a_head_is_as_long_in_many_pieces_as_in_one(
    front: Gateway, upstream: Engine, size: int
) -> None:
    for lines, status in (
        ([b"x-a: " + b"y" * 65_400], 200),
        ([b"a: "] * 10_000, 200),
        ([b"x-a: " + b"y" * 66_000], 431),
        ([b"a:"] * 60_000, 431),
    ):
        sent = request(*lines, NOT_SENT_ON)
        pieces = [sent[n : n + size] for n in range(0, len(sent), size)]
        assert await in_pieces(front, *pieces) == [status]


async def test_a_line_that_does_not_end_is_refused_before_it_is_large(front: Gateway) -> None:
    for start in (
        b"GET /",
        b"GET /healthz HTTP/1.1\r\nx-a: ",
        b"GET /healthz HTTP/1.1\r\n",
        chunks(b"d;"),
        chunks(b"d\r\n" + GOOD + b"\r\n0\r\n"),
        chunks(b"d\r\n" + GOOD + b"\r\n0\r\nx-a: "),
    ):
        assert await in_pieces(front, start, *[b"y" * 1000] * 66) == [431]


class Pipe(asyncio.Transport):
    """Takes what is written; the test says what comes back."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


END = b"content-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("size", [1000, 400_000])
@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        (b"HTTP/1.1 200 OK\r\n" + b"a: \r\n" * 10_000 + END, True),
        (b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 60_000 + END, False),
        (b"HTTP/1.1 102 Go on\r\n\r\n" * 1000 + b"HTTP/1.1 200 OK\r\n" + END, True),
        (b"HTTP/1.1 102 Go on\r\n\r\n" * 6000 + b"HTTP/1.1 200 OK\r\n" + END, False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000, True),
    ],
)
async def test_an_answer_s_head_is_as_long_in_one_piece_as_in_many(
    answer: bytes, taken: bool, size: int
) -> None:
    connection = Connection(lambda *_: None, lambda *_: None)
    connection.connection_made(Pipe())
    response = Response(asyncio.get_running_loop())
    connection.send(b"", b"", response)
    for start in range(0, len(answer), size):
        connection.data_received(answer[start : start + size])
    if taken:
        assert await response.read()
    else:
        with pytest.raises(Broken, match="too large"):
            await response.head()


# --- time


async def test_an_idle_caller_is_hung_up_on_and_one_that_waits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slowly(asked: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(1.0)
        return await echo(asked, payload)

    monkeypatch.setattr(_protocol, "IDLE_SECONDS", 0.3)
    async with gateway() as front, engine(slowly) as upstream:
        front.publish("teacher", upstream.url)
        quick = request(body=b"{")
        raw = await everything(front.port, quick + request() + quick)
    assert statuses(raw) == [400, 200, 400]  # and then hung up on


UNFINISHED = [
    b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n",
    b"GET /teacher/health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
]


@pytest.mark.parametrize("sent", UNFINISHED)
async def test_a_caller_that_is_answered_without_its_body_and_never_sends_it_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(_protocol, "IDLE_SECONDS", 0.3)
    async with gateway() as front:
        raw = await everything(front.port, sent)
        assert len(statuses(raw)) == 1
        # A body that comes after its answer is dropped, and what follows it is a request.
        late = UNFINISHED[1] + b"0123456789" + UNFINISHED[0]
        assert statuses(await everything(front.port, late)) == [200, 404]


async def test_a_caller_that_reads_nothing_for_long_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_protocol, "IDLE_SECONDS", 0.2)

    async def large(asked: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"text": "x" * (32 << 20)})

    async with gateway() as front, engine(large) as upstream:
        front.publish("teacher", upstream.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
        writer.write(request())
        await reader.readexactly(1000)  # and then no more than the buffers take
        await until(lambda: not front.connections)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(32 << 20)
        writer.close()
