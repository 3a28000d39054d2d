"""The few ASGI types and functions that the gateway is built from."""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The caller disconnected before its request was read."""


async def read_body(receive: Receive, limit: int = 2**31) -> bytes | None:
    """The whole request body; None when it is larger than ``limit``; raises ClientGone."""
    event = await receive()
    if event["type"] == "http.request" and not event.get("more_body"):
        body = event.get("body", b"")
        return body if len(body) <= limit else None
    parts = bytearray()
    while True:
        if event["type"] == "http.disconnect":
            raise ClientGone
        parts += event.get("body", b"")
        if len(parts) > limit:
            return None
        if not event.get("more_body"):
            return bytes(parts)
        event = await receive()


def header(scope: Scope, name: bytes) -> bytes | None:
    """A request header's first value; ``name`` in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def reply(send: Send, status: int, document: object, headers: Headers = ()) -> None:
    """A JSON answer."""
    await reply_bytes(send, status, json.dumps(document).encode(), (JSON, *headers))


async def reply_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """An answer with its length."""
    lines = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def lifespan(receive: Receive, send: Send, end: Callable[[], Awaitable[None]]) -> None:
    """Nothing to start; ``end`` runs at shutdown."""
    while True:
        event = await receive()
        if event["type"] == "lifespan.shutdown":
            await end()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
