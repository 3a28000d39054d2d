"""The few ASGI types and functions that the fence is built from."""

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """What a caller sent is at fault; the engine does not hear of it."""

    def __init__(
        self, status: int, detail: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(status, detail, headers)
        self.status, self.detail, self.headers = status, detail, headers


async def reply(
    send: Send, status: int, document: object, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    await reply_bytes(send, status, json.dumps(document).encode(), headers)


async def reply_bytes(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """``body`` is JSON already."""
    content = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*content, *headers]})
    await send({"type": "http.response.body", "body": body})


async def reply_text(send: Send, body: bytes) -> None:
    """What Prometheus reads."""
    kind = b"text/plain; version=0.0.4; charset=utf-8"
    content = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": content})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == wanted), None)


def renamed(scope: Scope, path: str) -> Scope:
    if scope["path"] == path:
        return scope
    return {**scope, "path": path, "raw_path": path.encode()}


def said_length(scope: Scope) -> int:
    """Bytes of a body as its head says them; 0 where it does not."""
    said = header(scope, "content-length") or ""
    return int(said) if said.isdecimal() else 0


def without_body(receive: Receive) -> Receive:
    """For a request that has no use for one: what comes of it is dropped, however long it is."""
    begun = False

    async def empty() -> ASGIMessage:
        nonlocal begun
        if not begun:
            begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await receive())["type"] != "http.disconnect":
            pass
        return message

    return empty
