"""Where one request ends and the next begins is never guessed: nothing is smuggled past, into or
out of the gateway, by a caller or by a backend, on data routes with and without the app."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
from aiohttp import web

from relax_infer.gateway._clock import Clock
from relax_infer.security import Caller, Callers
from tests.gateway.asking import ask, by_hand, status_of
from tests.gateway.fakes import Engine, Gateway, Say, engine, gateway, until, wire
from tests.gateway.test_gateway import echo

GOOD = b'{"text": "x"}'
SMUGGLED = (
    b'POST /teacher/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 17\r\n\r\n{"text":"inside"}'
)
CHUNKED = b"transfer-encoding: chunked"


def request(*lines: bytes, body: bytes = GOOD, length: bool = True, end: bytes = b"\r\n") -> bytes:
    """``length``: with the body's own."""
    own = [b"content-length: %d" % len(body)] if length else []
    head = [b"POST /teacher/generate HTTP/1.1", b"host: x", *own, *lines]
    return end.join(head) + end * 2 + body


def chunks(body: bytes, *lines: bytes) -> bytes:
    return request(CHUNKED, *lines, body=body, length=False)


REFUSED = {
    "length, then chunks": request(CHUNKED, body=b"0\r\n\r\n"),
    "chunks, then length": request(CHUNKED, b"content-length: 5", body=b"0\r\n\r\n", length=False),
    "two lengths that differ": request(b"content-length: 0"),
    "two lengths that agree": request(b"content-length: %d" % len(GOOD)),
    "a list of lengths": request(b"content-length: 13, 13", length=False),
    "a signed length": request(b"content-length: +13", length=False),
    "a negative length": request(b"content-length: -1", length=False),
    "a length in hex": request(b"content-length: 0xd", length=False),
    "a length with a point": request(b"content-length: 13.0", length=False),
    "an empty length": request(b"content-length:", length=False),
    "a length beyond 64 bits": request(b"content-length: 18446744073709551629", length=False),
    "an unknown coding": request(b"transfer-encoding: xchunked", length=False),
    "chunks that are not last": request(
        b"transfer-encoding: chunked, identity", body=b"0\r\n\r\n", length=False
    ),
    "a coding before the chunks": request(
        b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n", length=False
    ),
    "a tab that is none": request(
        b"transfer-encoding: \x0bchunked", body=b"0\r\n\r\n", length=False
    ),
    "a space before the colon": request(
        b"transfer-encoding : chunked", body=b"0\r\n\r\n", length=False
    ),
    "a folded line": request(b"x-a: 1", b" content-length: 0"),
    "a folded coding": request(b"transfer-encoding:", b" chunked", body=b"0\r\n\r\n", length=False),
    "lines that end in LF": request(end=b"\n"),
    "one line that ends in LF": request(b"x-a: 1\nx-b: 2"),
    "a line that ends in CR": request(b"x-a: 1\rtransfer-encoding: chunked"),
    "a chunk size that is none": chunks(b"g\r\n\r\n0\r\n\r\n"),
    "a negative chunk size": chunks(b"-1\r\n\r\n0\r\n\r\n"),
    "a chunk size with 0x": chunks(b"0xd\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a chunk size with a space": chunks(b" d\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": chunks(b"1000000000000000d\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "an empty chunk size": chunks(b"\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a chunk longer than it says": chunks(b"1\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a chunk shorter than it says": chunks(b"e\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a chunk size that ends in LF": chunks(b"d\n" + GOOD + b"\r\n0\r\n\r\n"),
    "an extension with a LF": chunks(b"d;a\nb\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    "a trailer without a colon": chunks(b"d\r\n" + GOOD + b"\r\n0\r\nnothing\r\n\r\n"),
    "chunks in HTTP/1.0": chunks(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/1.2": request().replace(b"HTTP/1.1", b"HTTP/1.2"),
    "a space in the target": request().replace(b"/generate", b"/gene rate"),
}
UNREAD = {"a length beyond 64 bits", "a chunk shorter than it says", "chunks in HTTP/1.0"}
"""May also be waited for, or hung up on, as long as nothing of them is answered as good."""


@pytest.fixture(params=[True, False], ids=["direct", "app"])
async def front(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with gateway(direct=request.param, body_timeout=0.5) as made:
        yield made


@pytest.fixture
async def upstream(front: Gateway) -> AsyncIterator[Engine]:
    async with engine(echo) as made:
        front.publish("teacher", made.url)
        yield made


def statuses(raw: bytes) -> list[int]:
    """Of every answer in it."""
    found: list[int] = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length: "):
                length = int(line.partition(b": ")[2])
        if status != 100:
            found.append(status)
        raw = rest[length:]
    return found


async def everything(port: int, sent: bytes) -> bytes:
    """What comes back until the gateway hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_of_doubtful_length_is_refused_and_nothing_after_it_is_read(
    front: Gateway, upstream: Engine, name: str
) -> None:
    raw = await everything(front.port, REFUSED[name] + SMUGGLED)
    got = statuses(raw)
    assert len(got) <= 1
    assert set(got) <= {400, 408}
    assert got or name in UNREAD
    assert upstream.posts == []
    assert (await ask("POST", f"{front.url}/teacher/generate", GOOD)).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        chunks(b"d;a=b;c\r\n" + GOOD + b"\r\n0;x\r\n\r\n"),
        chunks(b'd;a="1;2"\r\n' + GOOD + b"\r\n0\r\nx-late: 1\r\ncontent-length: 9\r\n\r\n"),
        chunks(b"00d\r\n" + GOOD + b"\r\n000\r\n\r\n"),
        chunks(b"6\r\n" + GOOD[:6] + b"\r\n7\r\n" + GOOD[6:] + b"\r\n0\r\n\r\n"),
    ],
)
async def test_what_chunks_may_have_is_taken_off_and_the_next_request_is_read(
    front: Gateway, upstream: Engine, sent: bytes
) -> None:
    closing = request(b"connection: close")
    # With an extension a strict server may refuse; what it may not do is to take it for content.
    got = statuses(await everything(front.port, sent + closing))
    assert got in ([200, 200], [400])
    bodies = [body for _, body in upstream.posts]
    assert bodies == [GOOD] * got.count(200)
    for headers, _ in upstream.posts:
        assert headers.getall("content-length") == [str(len(GOOD))]
        assert not {"transfer-encoding", "x-late"} & {name.lower() for name in headers}


async def test_garbage_after_a_good_request_does_not_take_the_place_of_its_answer(
    front: Gateway, upstream: Engine
) -> None:
    raw = await everything(front.port, request() + b"\x16\x03\x01 no HTTP\r\n\r\n" + SMUGGLED)
    assert statuses(raw) == [200, 400]
    assert len(upstream.posts) == 1


async def test_what_follows_a_last_request_is_not_read(front: Gateway, upstream: Engine) -> None:
    raw = await everything(front.port, request(b"connection: close") + SMUGGLED)
    assert statuses(raw) == [200]
    assert b"connection: close" in raw
    assert len(upstream.posts) == 1


async def test_a_chunk_that_breaks_after_a_good_request_is_refused_after_its_answer(
    front: Gateway, upstream: Engine
) -> None:
    raw = await everything(front.port, request() + chunks(b"d\r\nxx") + b"\r\n" * 20 + SMUGGLED)
    assert statuses(raw) == [200, 400]
    assert len(upstream.posts) == 1


async def test_many_requests_in_one_piece_are_answered_in_their_order(
    front: Gateway, upstream: Engine
) -> None:
    bad = request(body=b"{")
    raw = await everything(
        front.port, (bad * 700 + request()) * 2 + request(b"connection: close", body=b"[]")
    )
    assert statuses(raw) == [*([400] * 700 + [200]) * 2, 400]
    assert len(upstream.posts) == 2


async def test_a_caller_that_leaves_takes_its_waiting_requests_along(front: Gateway) -> None:
    async with wire(Say(None)) as upstream:
        front.publish("teacher", upstream.url)
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        body = b'{"text": "x", "rid": "first"}'
        writer.write(request(body=body) + request(body=body.replace(b"first", b"second")))
        await until(lambda: len(upstream.requests) == 1)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await until(lambda: upstream.closed == 1 and upstream.aborts == ["first"])
        await asyncio.sleep(0.05)
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("path", [b"/teacher/generate", b"/teacher/generate?app"])
@pytest.mark.parametrize("ahead", ["many", "large"])
async def test_a_caller_that_sent_more_than_may_wait_is_still_heard_to_leave(
    front: Gateway, path: bytes, ahead: str
) -> None:
    """Nothing is read from it any more, so not its end either."""
    rest = request() * 40 if ahead == "many" else request(body=GOOD + b" " * 200_000)
    async with wire(Say(None)) as upstream:
        front.publish("teacher", upstream.url)
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        first = request(body=b'{"text": "x", "rid": "first"}')
        writer.write(first.replace(b"/teacher/generate", path) + rest)
        await writer.drain()
        await until(lambda: len(upstream.requests) == 1)
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: upstream.closed == 1 and upstream.aborts == ["first"])
        assert len(upstream.requests) == 1


async def test_the_bodies_that_wait_for_their_turn_are_bounded() -> None:
    """A caller that sends on while nothing is answered is stopped by TCP, not by memory."""
    go = asyncio.Event()

    async def wait(asked: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        await go.wait()
        return await echo(asked, payload)

    async with gateway() as front, engine(wait) as upstream:
        front.publish("teacher", upstream.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        large = request(body=b'{"text": "%b"}' % (b"x" * 1_000_000))
        sending = asyncio.create_task(drained(writer, [large] * 64))
        await until(lambda: len(upstream.posts) == 1)
        await asyncio.sleep(0.2)
        assert not sending.done()
        go.set()
        answers = 0
        while answers < 64:
            answers += (await reader.read(1 << 16)).count(b"HTTP/1.1 200")
        await sending
        writer.close()


async def drained(writer: asyncio.StreamWriter, parts: list[bytes]) -> None:
    for part in parts:
        writer.write(part)
        await writer.drain()


# --- Expect: 100-continue


async def test_a_body_that_waits_to_be_asked_for_is_asked_for_once(
    front: Gateway, upstream: Engine
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head, _, body = request(b"expect: 100-continue", b"connection: close").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert upstream.posts == []
    writer.write(body)
    assert statuses(await reader.read()) == [200]
    assert "expect" not in upstream.posts[0][0]
    writer.close()


async def test_a_caller_that_is_not_asked_for_its_body_is_hung_up_on() -> None:
    """Whether its body comes after all is not known, so nothing after it can be read."""
    callers = Callers([Caller("c", b"0" * 32, frozenset(("teacher",)))])
    given: list[tuple[dict[str, Any], int]] = [({"callers": callers}, 401), ({"max_body": 5}, 413)]
    for options, status in given:
        async with gateway(**options) as front, engine(echo) as upstream:
            front.publish("teacher", upstream.url)
            head, _, _ = request(b"expect: 100-continue").partition(b"\r\n\r\n")
            raw = await everything(front.port, head + b"\r\n\r\n" + SMUGGLED)
            assert statuses(raw) == [status]
            assert b"connection: close" in raw.partition(b"\r\n\r\n")[0]
            assert upstream.posts == []


# --- what a backend says


def whole(body: bytes, *lines: bytes) -> bytes:
    own = b"content-length: %d" % len(body)
    return b"\r\n".join([b"HTTP/1.1 200 OK", own, *lines]) + b"\r\n\r\n" + body


POISON = whole(b'{"poison": 1}')
TRAILING = {
    "an answer that was not asked for": whole(b"{}") + POISON,
    "more than its length": whole(b"{}") + b"{}",
    "garbage": whole(b"{}") + b"\x00\xff" * 40,
    "an answer after its last": whole(b"{}", b"connection: close") + POISON,
    "an answer after its chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + POISON
    ),
}


@pytest.mark.parametrize("name", TRAILING)
async def test_what_a_backend_adds_to_its_answer_reaches_nobody(front: Gateway, name: str) -> None:
    """Two requests come in one piece, so that the second is there when the first is answered."""
    async with wire(Say(TRAILING[name], hang_up=False)) as upstream:
        front.publish("teacher", upstream.url)
        raw = await everything(front.port, request() + request(b"connection: close"))
    assert statuses(raw) == [200, 200]
    assert b"poison" not in raw
    assert raw.count(b"{}") == 2
    assert len(upstream.requests) == 2


BROKEN = {
    "length and chunks": whole(b"0\r\n\r\n", b"transfer-encoding: chunked"),
    "two lengths": whole(b"{}", b"content-length: 1"),
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}",
    "a length beyond 64 bits": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n{}" % 2**65,
    "lines that end in LF": whole(b"{}").replace(b"\r\n", b"\n"),
    "a folded line": whole(b"{}", b"x-a: 1", b" x-b: 2"),
    "a chunk size that is none": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n"
    ),
    "another protocol": b"HTTP/1.1 101 OK\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_backend_s_answer_of_doubtful_length_is_502(front: Gateway, name: str) -> None:
    async with wire(Say(BROKEN[name], hang_up=False)) as upstream:
        front.publish("teacher", upstream.url)
        answer = await ask("POST", f"{front.url}/teacher/generate", json.loads(GOOD))
    assert answer.status == 502
    assert len(upstream.requests) == 1


async def test_a_body_that_is_refused_early_is_read_and_dropped_within_its_time() -> None:
    async with gateway(max_body=100, body_timeout=0.4) as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        polite = request(body=b" " * 1000)
        raw = await everything(front.port, polite + request(b"connection: close"))
        assert statuses(raw) == [413, 200]
        begun = await everything(front.port, polite[:-500])
        assert statuses(begun) == [413]  # and then hung up on
        assert status_of(await by_hand(front.port, polite)) == 413


@pytest.mark.parametrize("uvloop_", [False, True])
def test_one_clock_is_late_for_each_in_its_order(uvloop_: bool) -> None:
    async def test() -> None:
        late: list[str] = []
        clock: Clock[str] = Clock(0.1, late.append)
        clock.start("a")
        clock.start("b")
        clock.start("gone")
        clock.stop("gone")
        clock.stop("never started")
        await asyncio.sleep(0.05)
        clock.start("a")  # again, and so after b
        clock.start("c")
        assert clock.running() == ["b", "a", "c"]
        await until(lambda: late == ["b", "a", "c"])
        clock.start("d")
        await until(lambda: late == ["b", "a", "c", "d"])
        assert clock.running() == []

    (uvloop.run if uvloop_ else asyncio.run)(test())


async def test_who_is_started_again_when_late_takes_no_further_timer() -> None:
    late: list[str] = []

    def again(who: str) -> None:
        late.append(who)
        if len(late) < 5:
            clock.start(who)

    clock: Clock[str] = Clock(0.01, again)
    loop, made = asyncio.get_running_loop(), list[object]()
    call_at = loop.call_at

    def counting(*given: Any, **more: Any) -> asyncio.TimerHandle:
        handle = call_at(*given, **more)
        if getattr(given[1], "__self__", None) is clock:
            made.append(handle)
        return handle

    loop.call_at = counting  # asyncio's call_later is one of these, too
    clock.start("a")
    await until(lambda: len(late) == 5)
    assert len(made) == 5
