"""Contract 4.1 and 4.4 on the wire: headers, streams byte for byte, backends that misbehave."""

import asyncio
import json

import aiohttp
import pytest

from tests.gateway.asking import ask, by_hand, get, status_of
from tests.gateway.fakes import Gateway, Say, engine, gateway, until, wire
from tests.gateway.test_gateway import echo

STREAM = {"text": "x", "stream": True, "rid": "r"}
PLAIN = {"text": "x", "rid": "r"}
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, lines, len(body), body)


async def one(front: Gateway, say: Say, payload: object) -> tuple[object, object]:
    async with wire(say) as upstream:
        front.publish("teacher", upstream.url)
        return await ask("POST", f"{front.url}/teacher/generate", payload), upstream


# --- headers


async def test_a_hop_s_own_headers_stay_here_and_the_rest_goes_on() -> None:
    hop = {
        *("keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "x-named", "x-also-named"),
    }
    async with gateway() as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        body = b'{"text": "x"}'
        lines = [
            *(b"POST /teacher/generate HTTP/1.1", b"Host: gateway.example"),
            *(b"Connection: X-Named, close ,x-ALSO-named", b"Keep-Alive: timeout=5"),
            *(b"Proxy-Authenticate: a", b"Proxy-Authorization: b", b"TE: trailers", b"Trailer: x"),
            *(b"X-Named: 1", b"X-Also-Named: 1", b"x-smg-ROUTING-key: group"),
            *(b"X-Request-ID: id-1", b"traceparent: 00-0af7-b7ad-01", b"tracestate: a=b"),
            *(b"Authorization: Bearer t", b"X-Own: \xc3\x9f", b"Accept: */*"),
            b"Content-Length: %d" % len(body),
        ]
        answer = await by_hand(front.port, b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert status_of(answer) == 200
    seen = upstream.posts[0][0]
    assert {name.lower() for name in seen} & hop == set()
    assert seen["Host"] == upstream.url.removeprefix("http://")
    assert seen["Content-Length"] == str(len(upstream.posts[0][1]))
    assert "X-SMG-Routing-Key" in list(seen)
    kept = ("X-Request-ID", "traceparent", "tracestate", "Authorization", "X-Own", "Accept")
    assert [seen[name] for name in kept] == [
        *("id-1", "00-0af7-b7ad-01", "a=b", "Bearer t", "ß", "*/*"),
    ]


async def test_a_hop_s_own_headers_of_an_answer_stay_here_too() -> None:
    say = Say(
        whole(
            b"{}",
            *(b"Connection: X-Hop", b"X-Hop: 1", b"Keep-Alive: timeout=9", b"Upgrade: h2c"),
            *(b"X-Twice: 1", b"X-Twice: 2", b"X-Request-Id: e-1"),
        )
    )
    async with gateway() as front:
        answer, _ = await one(front, say, PLAIN)
    assert answer.status == 200
    assert not {"X-Hop", "Keep-Alive", "Upgrade"} & set(answer.headers)
    assert answer.headers.getall("X-Twice") == ["1", "2"]
    assert answer.headers["X-Request-Id"] == "e-1"


async def test_an_error_of_the_gateway_s_own_names_the_request() -> None:
    async with gateway() as front:
        for payload, status in ((b"{", 400), (b'{"text": "x"}', 503)):
            url = f"{front.url}/teacher/generate"
            answer = await ask("POST", url, payload, {"X-Request-ID": "id-1"})
            assert (answer.status, answer.headers["X-Request-ID"]) == (status, "id-1")


async def test_an_empty_affinity_key_is_the_caller_s_fault() -> None:
    async with gateway() as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        url = f"{front.url}/teacher/generate"
        answer = await ask("POST", url, PLAIN, {"X-SMG-Routing-Key": " "})
    assert (answer.status, upstream.posts) == (400, [])


# --- streams


async def test_a_stream_s_bytes_are_never_parsed_or_framed_anew() -> None:
    """CRLF, bare CR, half a line, no final blank line, bytes that are no text."""
    parts = [b"data: a\r\n\r\ndata", b": b\r\r", b"\n: comment\n", b"\xff\x00", b"data: [DONE]"]
    say = Say(CHUNKED, *(chunk(part) for part in parts), b"0\r\n\r\n")
    async with gateway() as front:
        answer, upstream = await one(front, say, STREAM)
    assert answer.body == b"".join(parts)
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert upstream.aborts == []


async def test_a_stream_without_a_frame_of_its_own_ends_with_its_connection() -> None:
    say = Say(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\r\n\r\n")
    async with gateway() as front:
        answer, _ = await one(front, say, STREAM)
    assert (answer.status, answer.body) == (200, b"data: 1\r\n\r\n")


async def test_a_stream_of_known_length_keeps_it() -> None:
    async with gateway() as front:
        answer, _ = await one(front, Say(whole(b"data: 1\n\n")), STREAM)
    assert (answer.headers["Content-Length"], answer.body) == ("9", b"data: 1\n\n")


async def test_an_empty_stream_is_an_empty_answer() -> None:
    async with gateway() as front:
        answer, upstream = await one(front, Say(CHUNKED, b"0\r\n\r\n"), STREAM)
    assert (answer.status, answer.body, upstream.aborts) == (200, b"", [])


async def test_a_compressed_stream_is_passed_on_as_it_is() -> None:
    squeezed = b"\x1f\x8b not even gzip"
    head = CHUNKED[:-2] + b"content-encoding: gzip\r\n\r\n"
    async with gateway() as front:
        answer, _ = await one(front, Say(head, chunk(squeezed), b"0\r\n\r\n"), STREAM)
    assert (answer.headers["Content-Encoding"], answer.body) == ("gzip", squeezed)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (CHUNKED + chunk(b"data: 1\n\n"), b"zz\r\n"),
        (CHUNKED + chunk(b"data: 1\n\n"), b"ff\r\nshort"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: 1\n\n", b""),
    ],
)
async def test_a_stream_that_breaks_after_its_first_chunk_is_cut_off(
    first: bytes, then: bytes
) -> None:
    seen = asyncio.Event()
    async with gateway() as front, wire(Say(first, seen, then)) as upstream:
        front.publish("teacher", upstream.url)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{front.url}/teacher/generate", json=STREAM) as answer,
        ):
            assert (answer.status, await answer.content.read(9)) == (200, b"data: 1\n\n")
            seen.set()
            with pytest.raises(aiohttp.ClientError):
                await answer.content.read()
        await until(lambda: upstream.aborts == ["r"])
        assert len(upstream.requests) == 1
        assert (await get(f"{front.url}/healthz")).status == 200


@pytest.mark.parametrize("payload", [PLAIN, STREAM])
@pytest.mark.parametrize(
    "broken",
    [
        (),
        (b"HTTP/1.1 200",),
        (b"SSH-2.0-x\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",),
        (CHUNKED, b"zz\r\n"),
        (b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",),
    ],
)
async def test_a_backend_that_breaks_off_before_its_first_byte_is_502_and_not_asked_again(
    payload: dict[str, object], broken: tuple[bytes, ...]
) -> None:
    """Pain 2: a POST whose connection dropped is never sent a second time, and is aborted."""
    async with gateway() as front, wire(Say(*broken)) as upstream:
        front.publish("teacher", upstream.url)
        answer = await ask("POST", f"{front.url}/teacher/generate", payload)
        assert (answer.status, answer.detail) == (502, "Inference backend is unavailable")
        await until(lambda: upstream.aborts == ["r"])
        assert len(upstream.requests) == 1


async def test_an_answer_whose_body_breaks_off_is_502() -> None:
    async with gateway() as front:
        say = Say(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{")
        answer, upstream = await one(front, say, PLAIN)
    assert (answer.status, len(upstream.requests)) == (502, 1)


# --- one closing, on every way out


async def closed_once(front: Gateway, upstream: object) -> None:
    await until(lambda: upstream.closed == 1)
    assert (await get(f"{front.url}/healthz")).status == 200
    assert upstream.closed == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_closes_a_silent_backend_once(stream: bool) -> None:
    async with gateway(timeout=1.0) as front, wire(Say(None)) as upstream:
        front.publish("teacher", upstream.url)
        answer = await ask("POST", f"{front.url}/teacher/generate", PLAIN | {"stream": stream})
        assert (answer.status, answer.detail) == (504, "Inference request timed out")
        await closed_once(front, upstream)
        await until(lambda: upstream.aborts == ["r"])


async def test_the_deadline_within_a_stream_cuts_it_off_and_closes_once() -> None:
    say = Say(CHUNKED, chunk(b"data: 1\n\n"), None)
    async with gateway(timeout=1.0) as front, wire(say) as upstream:
        front.publish("teacher", upstream.url)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{front.url}/teacher/generate", json=STREAM) as answer,
        ):
            assert await answer.content.read(9) == b"data: 1\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        await closed_once(front, upstream)


@pytest.mark.parametrize("first", [b"", chunk(b"data: 1\n\n")])
async def test_a_caller_that_leaves_before_or_after_the_first_chunk_closes_once(
    first: bytes,
) -> None:
    """Pain 19: nobody decodes for a caller that is gone."""
    async with gateway() as front, wire(Say(CHUNKED + first, None)) as upstream:
        front.publish("teacher", upstream.url)
        body = json.dumps(STREAM).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = b"POST /teacher/generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await until(lambda: len(upstream.requests) == 1)
        writer.transport.abort()
        await closed_once(front, upstream)
        await until(lambda: upstream.aborts == ["r"])


async def test_an_error_status_of_a_stream_is_an_ordinary_error_and_closes_once() -> None:
    say = Say(
        b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ntransfer-encoding: chunked\r\n\r\n",
        chunk(b"half of a story"),
        None,
    )
    async with gateway() as front, wire(say) as upstream:
        front.publish("teacher", upstream.url)
        answer = await ask("POST", f"{front.url}/teacher/generate", STREAM)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.detail == "Inference backend answered 503"
        await closed_once(front, upstream)
        assert upstream.aborts == []


@pytest.mark.parametrize("fails_at", ["http.response.start", "http.response.body"])
async def test_a_server_that_cannot_send_on_closes_the_backend_once(fails_at: str) -> None:
    """The ASGI server fails, before the first chunk or at it."""
    from relax_infer.gateway import RegistryIntake, create_gateway_app
    from tests.gateway.fakes import registry

    intake = RegistryIntake()
    app = create_gateway_app(intake)
    body = json.dumps(STREAM).encode()
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if events:
            return events.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(event: dict[str, object]) -> None:
        if event["type"] == fails_at:
            raise OSError("the server is broken")

    async with wire(Say(CHUNKED, chunk(b"data: 1\n\n"), None)) as upstream:
        intake.offer("teacher", 1, registry("teacher", upstream.url))
        scope = {"type": "http", "method": "POST", "path": "/teacher/generate", "headers": []}
        with pytest.raises(OSError, match="the server is broken"):
            await app(scope, receive, send)
        await until(lambda: upstream.closed == 1 and upstream.aborts == ["r"])
        stopped = iter([{"type": "lifespan.shutdown"}])

        async def shutdown() -> dict[str, object]:
            return next(stopped)

        async def ignore(event: dict[str, object]) -> None:
            return

        await app({"type": "lifespan"}, shutdown, ignore)


async def test_under_a_server_that_has_no_hook_a_caller_that_leaves_is_noticed_all_the_same() -> (
    None
):
    from relax_infer.gateway import RegistryIntake, create_gateway_app
    from tests.gateway.fakes import registry

    intake = RegistryIntake()
    app = create_gateway_app(intake)
    asked = asyncio.Event()
    body = json.dumps(PLAIN).encode()
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if events:
            return events.pop()
        await asked.wait()
        return {"type": "http.disconnect"}

    async def send(event: dict[str, object]) -> None:
        raise AssertionError(event)

    async with wire(Say(None)) as upstream:
        intake.offer("teacher", 1, registry("teacher", upstream.url))
        scope = {"type": "http", "method": "POST", "path": "/teacher/generate", "headers": []}
        asking = asyncio.create_task(app(scope, receive, send))
        await until(lambda: len(upstream.requests) == 1)
        asked.set()
        await asking
        await until(lambda: upstream.closed == 1 and upstream.aborts == ["r"])


@pytest.mark.parametrize("payload", [PLAIN, STREAM])
async def test_an_answer_that_ended_normally_closes_nothing_and_its_connection_is_used_again(
    payload: dict[str, object],
) -> None:
    connections: set[object] = set()

    async def note(request: object, _: object) -> object:
        connections.add(request.transport.get_extra_info("peername"))
        return await echo(request, {})

    async with gateway() as front, engine(note) as upstream:
        front.publish("teacher", upstream.url)
        for _ in range(5):
            assert (await ask("POST", f"{front.url}/teacher/generate", payload)).status == 200
    assert len(connections) == 1


# --- the error map


@pytest.mark.parametrize(
    ("answer", "status", "detail"),
    [
        (whole(b'{"detail": "no"}', status=b"422 X"), 422, "no"),
        (whole(b'{"detail": [{"loc": 1}]}', status=b"422 X"), 422, [{"loc": 1}]),
        (whole(b'{"error": "no"}', status=b"400 X"), 400, '{"error": "no"}'),
        (whole(b"plain words", status=b"429 X"), 429, "plain words"),
        (whole(b"\xff", status=b"500 X"), 500, "\ufffd"),
        (whole(b"[" * 9000, status=b"500 X"), 500, "[" * 9000),
        (whole(b"x" * 70000, status=b"500 X"), 500, "Inference backend answered 500"),
        (whole(b"", status=b"307 X"), 502, "Inference backend answered 307"),
        (whole(b"", b"location: http://127.0.0.1:9/", status=b"302 X"), 502, None),
        (whole(b""), 502, "Inference backend did not answer JSON"),
        (whole(b"{} {}"), 502, "Inference backend did not answer JSON"),
        (b"HTTP/1.1 204 X\r\n\r\n", 502, "Inference backend did not answer JSON"),
    ],
)
async def test_a_backend_s_error_keeps_its_status_and_words(
    answer: bytes, status: int, detail: object
) -> None:
    async with gateway() as front:
        reply, upstream = await one(front, Say(answer), PLAIN)
    assert reply.status == status
    assert detail is None or reply.detail == detail
    assert "Location" not in reply.headers
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("kind", ["generate", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_retry_after_of_the_backend_is_passed_on(kind: str, stream: bool) -> None:
    """The gap of the findings' table: a guard's 503 says when to come back."""
    later = b"Wed, 21 Oct 2026 07:28:00 GMT"
    say = Say(whole(b'{"detail": "closed"}', b"Retry-After: " + later, status=b"503 X"))
    async with gateway() as front, wire(say) as upstream:
        front.publish("teacher", upstream.url)
        payload = {"text": "x"} if kind == "generate" else {"messages": []}
        answer = await ask("POST", f"{front.url}/teacher/{kind}", payload | {"stream": stream})
    assert (answer.status, answer.detail) == (503, "closed")
    assert answer.headers.getall("Retry-After") == [later.decode()]


async def test_a_provider_that_fails_or_is_of_another_role_is_503() -> None:
    from relax_infer.gateway import InferenceGatewayHandler
    from relax_infer.gateway._answers import Exchange
    from relax_infer.gateway._errors import GatewayError
    from tests.gateway.fakes import registry

    async def broken() -> dict[str, object]:
        raise OSError("no registry")

    async def other() -> dict[str, object]:
        return registry("genrm", "http://127.0.0.1:9")

    async def invalid() -> dict[str, object]:
        return {"pid": 1}

    for provider in (broken, other, invalid):
        handler = InferenceGatewayHandler("teacher", provider)
        for ask_it in (handler.generate, handler.chat):
            with pytest.raises(GatewayError) as raised:
                await ask_it(b'{"text": "x"}' if ask_it == handler.generate
                             else b'{"messages": []}', [], Exchange())  # fmt: skip
            assert raised.value.status == 503
            assert raised.value.headers == ((b"retry-after", b"1"),)
        assert (await handler.health())["registry_available"] is False
        await handler.close()
