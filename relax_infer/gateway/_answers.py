"""From a backend's response to what the caller gets: a whole answer, a stream, or an error."""

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp

from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._headers import to_caller
from relax_infer.gateway._payload import is_json

_seen: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()
"""Ends of connections whose errors are looked at."""
_ERROR_BODY = 65536
"""Bytes of an upstream error's body that are passed on."""


@dataclass
class Answer:
    """A backend's answer on its way to the caller."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """Everything, or the first chunk of a stream."""
    rest: AsyncIterator[bytes] | None = None
    """The other chunks of a stream, untouched."""


@dataclass
class Exchange:
    """One request under way; :meth:`InferenceGatewayHandler.end` must be called exactly once."""

    rids: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    """Addresses that may hold the request: the target, or every engine behind the router."""
    upstream: aiohttp.ClientResponse | None = None
    asked: bool = False
    """A backend was or is being asked."""
    finished: bool = False
    """The backend has answered and has nothing more to do for this request."""
    unwatch: Callable[[], object] | None = None
    """Stops looking whether the backend hangs up."""


async def answer_of(
    response: aiohttp.ClientResponse, exchange: Exchange, *, stream: bool
) -> Answer:
    """The response as it came; a stream's first chunk is awaited.

    ``exchange.upstream`` is the response already, so that every way out gives it back.

    Raises:
        GatewayError: an error status with the backend's own text, or 502.
    """
    _notice_hang_up(response, exchange)
    if not 200 <= response.status < 300:
        raise await _upstream_error(response, exchange)
    if stream:
        return await stream_of(response, exchange)
    body = await read_all(response)
    exchange.finished = True
    if not is_json(body):
        raise GatewayError(502, "Inference backend did not answer JSON")
    return Answer(response.status, to_caller(response.raw_headers, buffered=True), body)


def _notice_hang_up(response: aiohttp.ClientResponse, exchange: Exchange) -> None:
    """Fail a read that waits on a connection that is gone.

    After a chunk that cannot be parsed aiohttp closes the connection and tells nobody who reads.
    """
    protocol = None if response.connection is None else response.connection.protocol
    closed = None if protocol is None else protocol.closed
    if closed is None:
        return

    if closed not in _seen:
        _seen.add(closed)
        closed.add_done_callback(_see)

    def fail(_: object) -> None:
        content = response.content
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was lost"))

    closed.add_done_callback(fail)
    exchange.unwatch = lambda: closed.remove_done_callback(fail)


def _see(closed: asyncio.Future[None]) -> None:
    """An error that nobody asks for would be logged by asyncio."""
    if not closed.cancelled():
        closed.exception()


async def stream_of(response: aiohttp.ClientResponse, exchange: Exchange) -> Answer:
    """Whatever comes, chunk by chunk.

    Raises:
        GatewayError: 502, it broke off before the first chunk.
    """
    first = await _read(response)
    exchange.finished = not first
    rest = _rest(response, exchange) if first else None
    headers = to_caller(response.raw_headers, buffered=rest is None, decoded=False)
    return Answer(response.status, headers, first, rest)


async def read_all(response: aiohttp.ClientResponse) -> bytes:
    """The whole body; raises GatewayError: 502."""
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


async def _rest(response: aiohttp.ClientResponse, exchange: Exchange) -> AsyncIterator[bytes]:
    while chunk := await _read(response):
        yield chunk
    exchange.finished = True


async def _upstream_error(response: aiohttp.ClientResponse, exchange: Exchange) -> GatewayError:
    """The same status, with its Retry-After and what it says; a redirection is none of ours."""
    exchange.finished = True
    if response.status < 400:
        return GatewayError(502, f"Inference backend answered {response.status}")
    again = tuple(
        (b"retry-after", value)
        for key, value in response.raw_headers
        if key.lower() == b"retry-after"
    )
    length = response.content_length
    if length is None or length > _ERROR_BODY:
        return GatewayError(response.status, f"Inference backend answered {response.status}", again)
    text = (await read_all(response)).decode(errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return GatewayError(response.status, text, again)
    detail = document.get("detail", text) if isinstance(document, dict) else text
    return GatewayError(response.status, detail, again)
