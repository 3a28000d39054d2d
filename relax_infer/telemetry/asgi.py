"""A span around each HTTP request that a part answers."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from relax_infer.telemetry.traces import HEADER, span, traceparent

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Route = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEADER = HEADER.encode()


def traced(route: Route, name: str) -> Route:
    """``route`` with a span below the caller's, whose place in the headers it takes: what the
    route passes on is below the route's own span."""

    async def around(scope: Scope, receive: Receive, send: Send) -> None:
        headers = list(scope["headers"])
        given = next((value for key, value in headers if key == _HEADER), b"")
        with span(name, parent=given.decode("latin-1") or None) as note:
            own = (traceparent() or "").encode()
            others = [pair for pair in headers if pair[0] != _HEADER]
            scope["headers"] = [*others, (_HEADER, own)]

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    note("http.response.status_code", message["status"])
                await send(message)

            await route(scope, receive, watched)

    return around
