"""Hostile requests: refused within limits, without growth, and the next good one works."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relax_infer.gateway import _protocol
from tests.gateway.asking import ask, by_hand, status_of
from tests.gateway.fakes import Engine, engine, gateway
from tests.gateway.hostile import BODIES, GOOD, HEADS, MESSAGES, answered, framed
from tests.gateway.test_gateway import echo


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
        assert answer.json.keys() == {"detail"}
        assert len(answer.body) < 1000, "it does not say again what was sent"
        assert upstream.posts == []
        assert (await ask("POST", f"{front.url}/genrm/generate", GOOD)).status == 200


@pytest.mark.parametrize("name", MESSAGES)
async def test_hostile_messages_are_refused_before_anything_is_made_of_them(
    upstream: Engine, name: str
) -> None:
    rendered: list[object] = []

    async def render(model: str, messages: object, sampling: object) -> dict[str, Any]:
        rendered.append(messages)
        return {"input_ids": [1], "sampling_params": sampling}

    async with gateway(genrm_render=render) as front:
        front.publish("genrm", upstream.url)
        url = f"{front.url}/genrm/generate"
        answer = await ask("POST", url, MESSAGES[name])
        assert (answer.status, answer.json.keys()) == (400, {"detail"})
        assert len(answer.body) < 1000
        assert rendered == upstream.posts == []
        assert (await ask("POST", url, GOOD)).status == 200


@pytest.mark.parametrize("name", HEADS)
async def test_a_hostile_head_is_refused_and_the_next_request_works(
    upstream: Engine, name: str
) -> None:
    async with gateway() as front:
        front.publish("genrm", upstream.url)
        answer = await by_hand(front.port, HEADS[name], finish=name.endswith("at all"))
        assert status_of(answer) == answered(name), answer
        first, _, others = answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 ")
        assert json.loads(first).keys() == {"detail"}
        # What a line break makes of one header is a second request, and is answered as such.
        assert others[:3] == (b"200" if name == "CRLF within a value" else b"")
        assert upstream.posts == []
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


async def test_a_caller_that_goes_on_sending_still_reads_why_it_was_hung_up(
    upstream: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that nobody reads would reset its connection, and the answer with it."""
    monkeypatch.setattr(_protocol, "LINGER_SECONDS", 1.0)
    async with gateway(body_timeout=0.1) as front:
        front.publish("genrm", upstream.url)
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(b"POST /genrm/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n")
        for _ in range(20):  # the answer comes after a quarter of it
            writer.write(b" ")
            await asyncio.sleep(0.02)
        assert status_of(await reader.read()) == 408

        async def go_on() -> None:
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

        with pytest.raises(ConnectionError):  # nor is it listened to for ever
            await asyncio.wait_for(go_on(), 10)
        writer.close()
    assert upstream.posts == []


async def test_a_head_that_does_not_end_is_408_whether_or_not_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
