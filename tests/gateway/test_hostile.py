"""Hostile requests: refused within limits, without growth, and the next good one works."""

import asyncio
import io
import json
import random
import string
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.gateway.asking import ask, by_hand, get, status_of
from tests.gateway.fakes import Engine, engine, gateway, registry, until
from tests.gateway.test_gateway import echo

FEW, MANY = 400, 10_000
GROWTH = 48 << 20
"""Bytes by which the process may be larger afterwards."""
REFUSED = {400, 404, 405, 408, 413, 431}
GOOD = b'{"text": "x"}'


def framed(body: bytes, *lines: bytes, path: bytes = b"/genrm/generate") -> bytes:
    head = [
        b"POST " + path + b" HTTP/1.1",
        b"host: x",
        *lines,
        b"content-length: %d" % len(body),
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


BODIES = {
    "deep list": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"text": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "deep and unclosed": b'{"text": ' + b"[" * 500_000,
    "invalid UTF-8 in a value": b'{"text": "\xff\xfe"}',
    "invalid UTF-8 in a key": b'{"\xc3\x28": 1, "text": "x"}',
    "overlong UTF-8": b'{"text": "\xc0\xaf"}',
    "UTF-16": '{"text": "x"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a NUL": b'{"text": "\x00"}',
    "a doubled key": b'{"text": "x", "text": "y"}',
    "a doubled selector": b'{"model": "m","text":"x","model":"n"}',
    "a doubled key, once escaped": b'{"stream": false, "text": "x", "str\\u0065am": true}',
    "NaN": b'{"text": NaN}',
    "Infinity": b'{"text": -Infinity}',
    "a number without an end": b'{"text": 1e}',
    "a leading zero": b'{"text": 01}',
    "two documents": GOOD + GOOD,
    "a trailing comma": b'{"text": "x",}',
    "single quotes": b"{'text': 'x'}",
    "a comment": b'{"text": "x" /* */}',
    "not an object": b"[1]",
    "nothing": b"",
    "a huge key": b'{"model": "' + b"x" * 1_000_000 + b'", "text": "x"}',
}
HEADS = {
    "CRLF within a value": framed(GOOD, b"x-a: 1\r\n\r\nGET /healthz HTTP/1.1"),
    "a bare CR": framed(GOOD, b"x-a: 1\rx-b: 2"),
    "a NUL in a value": framed(GOOD, b"x-a: \x00"),
    "a header without a colon": framed(GOOD, b"nothing"),
    "a space in a name": framed(GOOD, b"x a: 1"),
    "a space before the colon": framed(GOOD, b"x-a : 1"),
    "two lengths": framed(GOOD, b"content-length: 5"),
    "a negative length": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    "a length that is no number": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n",
    "a huge length": b"POST /genrm/generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % 10**30,
    "length and chunks": framed(GOOD, b"transfer-encoding: chunked"),
    "an unknown coding": b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: x\r\n\r\n",
    "a chunk size that is none": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5;\r\nzz\r\n"
    ),
    "a length after the chunks": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\ncontent-length: 99\r\n\r\n"
    ),
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "an unknown method": framed(GOOD).replace(b"POST", b"PWN", 1),
    "a path that is none": framed(GOOD, path=b"genrm/generate"),
    "a path with bytes": framed(GOOD, path=b"/genrm/\xff"),
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a head that is too large": b"GET /healthz HTTP/1.1\r\n" + b"x-a: " + b"y" * 300_000,
    "a head that is too large, whole and with its body": framed(GOOD, b"x-a: " + b"y" * 70_000),
    "headers that are too many, whole and with their body": framed(GOOD, *[b"x-a: 1"] * 20_000),
    "headers that are too many and short, whole and with their body": framed(
        GOOD, *[b"a:"] * 60_000
    ),
    "a target that is too large, whole and with its body": framed(
        GOOD, path=b"/genrm/generate?" + b"y" * 70_000
    ),
    "trailers that are too many": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\n" + b"a:\r\n" * 60_000 + b"\r\n"
    ),
    "a trailer that does not end": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        b"d\r\n" + GOOD + b"\r\n0\r\nx-a: " + b"y" * 700_000
    ),
    "a chunk extension that does not end": (
        b"POST /genrm/generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nd;" + b"y" * 300_000
    ),
    "too many headers": b"GET /healthz HTTP/1.1\r\n" + b"x-a: 1\r\n" * 60_000,
    "a request line that is too large": b"GET /" + b"y" * 300_000,
}


@pytest.fixture
async def upstream() -> AsyncIterator[Engine]:
    async with engine(echo) as made:
        yield made


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["generate", "chat/completions"])
async def test_a_hostile_body_is_refused_and_reaches_no_engine(
    upstream: Engine, name: str, path: str
) -> None:
    body = BODIES[name]
    if path != "generate":
        body = body.replace(b'"text"', b'"messages"')
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        answer = await ask("POST", f"{front.url}/genrm/{path}", body)
        assert answer.status == 400
        assert len(answer.body) < 2_000_000
        assert upstream.posts == []
        assert (await ask("POST", f"{front.url}/genrm/generate", GOOD)).status == 200


@pytest.mark.parametrize("name", HEADS)
async def test_a_hostile_head_is_refused_and_the_next_request_works(
    upstream: Engine, name: str
) -> None:
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        answer = await by_hand(front.port, HEADS[name], finish=name.endswith("at all"))
        if answer:
            assert status_of(answer) in REFUSED, answer
            body = answer.partition(b"\r\n\r\n")[2]
            assert name == "CRLF within a value" or "detail" in json.loads(body)
        assert name == "CRLF within a value" or upstream.posts == []
        assert (await ask("POST", f"{front.url}/genrm/generate", GOOD)).status == 200


async def test_what_only_the_engine_reads_passes_as_it_is(upstream: Engine) -> None:
    """Numbers beyond any type, doubled keys further down, escapes: not ours to judge."""
    body = (
        b'{"input_ids":[1e999,' + b"9" * 9000 + b',-0.0,1E+2],"sampling_params":{"a":1,"a":2},'
        b'"text2":"\\u00df\\/"}'
    )
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        await ask("POST", f"{front.url}/genrm/generate", body)
    assert upstream.posts[0][1] == body


TOKENS = list(range(2000))
LARGE = [
    {"model": "m", "input_ids": TOKENS, "rid": "r"},
    {"input_ids": TOKENS, "model": "m", "text2": 'a "input_ids": [1] b'},
    {"x": {"input_ids": TOKENS}, "input_ids": [], "model": "m"},
    {"x": [{"input_ids": [1]}], "input_ids": TOKENS, "model": "m"},
    {'my"input_ids': TOKENS, "input_ids": [[]], "route_key": "k"},
    {"input_ids": [TOKENS, TOKENS], "model": "m"},
    {"text": "ß" * 5000, "model": "m", "x": {"input_ids": [1, 2]}},
]


@pytest.mark.parametrize("payload", LARGE)
@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": 1}])
async def test_large_payloads_come_to_the_engine_as_they_were_meant(
    upstream: Engine, payload: dict[str, object], style: dict[str, object]
) -> None:
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        body = json.dumps(payload, **style).encode()
        assert (await ask("POST", f"{front.url}/genrm/generate", body)).status == 200
    left = {k: v for k, v in payload.items() if k not in ("model", "route_key")}
    assert json.loads(upstream.posts[0][1]) == left


@pytest.mark.parametrize(
    "tail",
    [
        *(
            b', "model": "n"}',
            b', "input_ids": [1]}',
            b', "\\u0069nput_ids": [1]}',
            b"}}",
            b"",
            b"}]",
        ),
        *(b', "text2": }', b', "mode\\u006c": "n"}', b" x}", b"] }", b', "text2": "\xff"}'),
    ],
)
async def test_a_large_payload_is_read_as_strictly_around_its_tokens(
    upstream: Engine, tail: bytes
) -> None:
    body = b'{"model": "m", "input_ids": %b' % json.dumps(TOKENS).encode()
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        assert (await ask("POST", f"{front.url}/genrm/generate", body + tail)).status == 400
        assert upstream.posts == []
        assert (await ask("POST", f"{front.url}/genrm/generate", body + b"}")).status == 200


@pytest.mark.parametrize("indent", [None, 2])
async def test_however_a_payload_is_spaced_no_key_of_it_is_taken_for_a_doubled_one(
    upstream: Engine, indent: int | None
) -> None:
    payload = {"text": "ß", "sampling_params": {"text": 1}, "x": [{"text": 1}]}
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        for body in (
            json.dumps(payload, indent=indent),
            json.dumps(payload, indent=indent, ensure_ascii=False),
            json.dumps(payload, indent=indent, separators=(",", ":")),
        ):
            assert (await ask("POST", f"{front.url}/genrm/generate", body.encode())).status == 200


async def test_a_body_that_is_too_large_is_413_by_its_length_or_by_its_bytes(
    upstream: Engine,
) -> None:
    async with gateway(max_body=1000) as front:
        front.publish("genrm", upstream.url)
        url = f"{front.url}/genrm/generate"
        just = b'{"text":"' + b"x" * 989 + b'"}'
        assert (await ask("POST", url, just)).status == 200
        answer = await ask("POST", url, just + b" ")
        assert (answer.status, "1000 bytes" in answer.detail) == (413, True)
        chunks = b"POST /genrm/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        raw = await by_hand(front.port, chunks + b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert status_of(raw) == 413
        assert b"connection: close" in raw
    assert len(upstream.posts) == 1


async def test_a_body_that_does_not_come_is_408(upstream: Engine) -> None:
    async with gateway(body_timeout=0.2) as front:
        front.publish("genrm", upstream.url)
        raw = await by_hand(front.port, framed(GOOD)[:-1])
        assert (status_of(raw), b"connection: close" in raw) == (408, True)
        assert upstream.posts == []
        assert (await ask("POST", f"{front.url}/genrm/generate", GOOD)).status == 200


async def test_a_body_that_trickles_in_has_no_more_time_than_one_that_does_not_come(
    upstream: Engine,
) -> None:
    async with gateway(body_timeout=0.4) as front:
        front.publish("genrm", upstream.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /genrm/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n")
        answer = asyncio.create_task(reader.read())
        sent = 0
        while not answer.done():
            writer.write(b" ")
            sent += 1
            await asyncio.sleep(0.02)
        assert (status_of(await answer), sent < 9999) == (408, True)
        writer.close()
        assert upstream.posts == []


async def test_a_head_that_does_not_end_is_408_whether_or_not_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from relax_infer.gateway import _protocol

    monkeypatch.setattr(_protocol, "HEAD_SECONDS", 0.3)
    async with gateway() as front:
        assert status_of(await by_hand(front.port, b"")) == 408
        assert status_of(await by_hand(front.port, b"GET /healthz HTTP/1.1\r\nhost:")) == 408
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /he")
        got = await asyncio.wait_for(reader.read(), 10)
        assert got.count(b"HTTP/1.1 200") == 1
        assert got.count(b"HTTP/1.1 408") == 1
        writer.close()


async def test_trailers_do_not_become_headers(upstream: Engine) -> None:
    head = b"POST /genrm/generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\nX-Late: 1\r\n\r\n" % (len(GOOD), GOOD)
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        assert status_of(await by_hand(front.port, head + body)) == 200
    assert "X-Late" not in upstream.posts[0][0]


async def test_another_protocol_is_refused_before_its_body_is_taken_for_it(
    upstream: Engine,
) -> None:
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        for offer in (b"h2c", b"websocket"):
            sent = framed(GOOD, b"connection: Upgrade", b"upgrade: " + offer)
            raw = await by_hand(front.port, sent)
            assert (status_of(raw), b"without it" in raw) == (400, True)
        assert (await ask("POST", f"{front.url}/genrm/generate", GOOD)).status == 200
    assert len(upstream.posts) == 1


async def test_requests_one_after_the_other_on_one_connection_are_answered_in_order(
    upstream: Engine,
) -> None:
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(framed(GOOD) + framed(b"{") + framed(GOOD, b"connection: close"))
        got = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    lines = [line for line in got.split(b"\r\n") if b"HTTP/1.1 " in line]
    assert [line.rpartition(b"HTTP/1.1 ")[2][:3] for line in lines] == [b"200", b"400", b"200"]


# --- many of them, against a process of its own


def hostile(rng: random.Random) -> bytes:
    """One request that is wrong somewhere, as raw bytes."""
    kind = rng.random()
    if kind < 0.35:
        body = rng.choice(list(BODIES.values()))
        return framed(body, b"connection: close")
    if kind < 0.55:
        return rng.choice(list(HEADS.values()))
    good = bytearray(
        framed(
            json.dumps(
                {
                    "model": rng.choice(["m", "n", "", None, 3]),
                    "text": "".join(rng.choices(string.printable, k=rng.randrange(200))),
                    "stream": rng.choice([False, None, 0]),
                }
            ).encode(),
            b"x-request-id: " + str(rng.random()).encode(),
            b"connection: close",
        )
    )
    if kind < 0.85:
        for _ in range(rng.randrange(1, 8)):
            good[rng.randrange(len(good))] = rng.randrange(256)
    else:
        del good[rng.randrange(10, len(good)) :]
    return bytes(good)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[psutil.Process, int, Path]]:
    """A gateway of its own, and the file that it serves from."""
    from tests.gateway.test_standalone import started

    file = tmp_path / "registry.json"
    file.write_text(json.dumps({"genrm": registry("genrm", "http://127.0.0.1:9")}))
    with started(file) as (running, url):
        yield psutil.Process(running.pid), int(url.rpartition(":")[2]), file


async def bombard(process: tuple[psutil.Process, int, Path], upstream: Engine, count: int) -> None:
    gateway_process, port, file = process
    file.write_text(json.dumps({"genrm": registry("genrm", upstream.url)}))
    url = f"http://127.0.0.1:{port}"

    async def good() -> int:
        return (await ask("POST", f"{url}/genrm/generate", GOOD)).status

    async with asyncio.timeout(20):
        while await good() != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    rng = random.Random(count)
    statuses: dict[int, int] = {}
    gate = asyncio.Semaphore(16)

    async def one(sent: bytes) -> None:
        async with gate:
            raw = await by_hand(port, sent, finish=True)
            status = status_of(raw) if raw.startswith(b"HTTP/1.1 ") else 0
            statuses[status] = statuses.get(status, 0) + 1

    warm = count // 4
    await asyncio.gather(*(one(hostile(rng)) for _ in range(warm)))
    before = gateway_process.memory_info().rss
    for _ in range(warm, count, 100):
        await asyncio.gather(*(one(hostile(rng)) for _ in range(100)))
        assert await good() == 200
    assert sum(statuses[s] for s in statuses if s in REFUSED) > count / 2
    # 200: the flipped bytes left it whole; 0: hung up on without words.
    assert set(statuses) <= REFUSED | {0, 200}, statuses
    assert gateway_process.memory_info().rss - before < GROWTH
    assert gateway_process.num_fds() < 64


async def test_some_hundred_hostile_requests(
    process: tuple[psutil.Process, int, Path], upstream: Engine
) -> None:
    await bombard(process, upstream, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_ten_thousand_hostile_requests(
    process: tuple[psutil.Process, int, Path], upstream: Engine
) -> None:
    await bombard(process, upstream, MANY)


async def test_a_hundred_megabytes_are_refused_and_not_kept(
    process: tuple[psutil.Process, int, Path],
) -> None:
    gateway_process, port, _ = process
    url = f"http://127.0.0.1:{port}/genrm/generate"
    before = gateway_process.memory_info().rss

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    assert (await ask("POST", url, io.BytesIO(b" " * (100 << 20)))).status == 413
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            try:
                async with session.post(url, data=endless()) as answer:
                    assert answer.status == 413
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                pass  # hung up on while sending
    assert (await get(f"http://127.0.0.1:{port}/healthz")).status == 200
    await until(lambda: gateway_process.memory_info().rss - before < GROWTH)
