"""From a backend's response to what the caller gets: a whole answer, a stream, or an error."""

import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from relax_infer.gateway._asgi import Headers, Send, reply_bytes
from relax_infer.gateway._connection import Broken, Response
from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._headers import to_caller
from relax_infer.gateway._payload import is_json

_RETRY = b"retry-after"
_ERROR_BODY = 65536
"""Bytes of an upstream error's body that are passed on."""
_DECODED_BODY = 64 << 20
"""Bytes that an encoded body may come to: it is decoded between other requests, a fifth of a second
for so much. An engine's own answers are not encoded."""


@dataclass
class Answer:
    """A backend's answer on its way to the caller."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """Everything, or the first chunk of a stream."""
    rest: AsyncIterator[bytes] | None = None
    """The other chunks of a stream, untouched."""


@dataclass(eq=False)
class Exchange:
    """One request under way; :meth:`InferenceGatewayHandler.end` must be called exactly once."""

    rids: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    """Addresses that may hold the request: the target, or every engine behind the router."""
    upstream: Response | None = None
    asked: bool = False
    """A backend was or is being asked."""
    finished: bool = False
    """The backend has answered and has nothing more to do for this request."""


async def answer_of(response: Response, exchange: Exchange, *, stream: bool) -> Answer:
    """The response as it came; a stream's first chunk is awaited.

    ``exchange.upstream`` is the response already, so that every way out gives it back.

    Raises:
        GatewayError: an error status with the backend's own text, or 502.
    """
    if not 200 <= response.status < 300:
        raise await _upstream_error(response, exchange)
    if stream:
        return await stream_of(response, exchange)
    body = await _read_all(response)
    exchange.finished = True
    return whole_of(response.status, response.headers, body)


def whole_of(status: int, headers: Headers, body: bytes) -> Answer:
    """A good status with its body as it came; raises GatewayError: 502, the body is not JSON."""
    body = decoded(headers, body)
    if not is_json(body):
        raise GatewayError(502, "Inference backend did not answer JSON")
    return Answer(status, to_caller(headers, buffered=True), body)


async def stream_of(response: Response, exchange: Exchange) -> Answer:
    """Whatever comes, chunk by chunk.

    Raises:
        GatewayError: 502, it broke off before the first chunk.
    """
    first = await _read(response)
    exchange.finished = not first
    rest = _rest(response, exchange) if first else None
    headers = to_caller(response.headers, buffered=rest is None, decoded=False)
    return Answer(response.status, headers, first, rest)


async def send_answer(send: Send, answer: Answer) -> None:
    """Raises GatewayError: a stream broke off, after some of it has been sent."""
    if answer.rest is None:
        await reply_bytes(send, answer.status, answer.body, answer.headers)
        return
    start = {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    async for chunk in answer.rest:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def is_told(status: int, length: int | None) -> bool:
    """Whether the body of an error is read, to be passed on."""
    return status >= 400 and length is not None and length <= _ERROR_BODY


def error_of(status: int, headers: Headers, body: bytes | None) -> GatewayError:
    """The same status, with its Retry-After and what it says; a redirection is none of ours."""
    if status < 400:
        return GatewayError(502, f"Inference backend answered {status}")
    again = tuple((b"retry-after", value) for key, value in headers if key.lower() == _RETRY)
    if body is None:
        return GatewayError(status, f"Inference backend answered {status}", again)
    try:
        text = decoded(headers, body).decode(errors="replace")
    except GatewayError as error:
        return error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return GatewayError(status, text, again)
    detail = document.get("detail", text) if isinstance(document, dict) else text
    return GatewayError(status, detail, again)


def decoded(headers: Headers, body: bytes) -> bytes:
    """The body with its content encoding undone; raises GatewayError: 502."""
    for key, value in headers:
        if len(key) == 16 and key.lower() == b"content-encoding":
            body = _decoded(body, value.strip().lower())
    return body


async def _read_all(response: Response) -> bytes:
    try:
        return await response.read()
    except Broken as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


def _decoded(body: bytes, encoding: bytes) -> bytes:
    if encoding == b"identity" or not body:
        return body
    if encoding not in (b"gzip", b"deflate"):
        raise GatewayError(502, "Inference backend answered in an unknown content encoding")
    # Of "deflate" there are two kinds in use: with zlib's frame, as it is named, and without.
    framed = encoding == b"gzip" or body[0] & 0x0F == 8
    undo = zlib.decompressobj(wbits=47 if framed else -15)
    try:
        plain = undo.decompress(body, _DECODED_BODY)
    except zlib.error as error:
        raise GatewayError(502, "Inference backend's content encoding is broken") from error
    if not undo.eof:
        raise GatewayError(502, "Inference backend's content encoding is broken, or too large")
    return plain


async def _read(response: Response) -> bytes:
    try:
        return await response.read_some()
    except Broken as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


async def _rest(response: Response, exchange: Exchange) -> AsyncIterator[bytes]:
    while chunk := await _read(response):
        yield chunk
    exchange.finished = True


async def _upstream_error(response: Response, exchange: Exchange) -> GatewayError:
    exchange.finished = True
    told = is_told(response.status, response.length)
    body = await _read_all(response) if told else None
    return error_of(response.status, response.headers, body)
