"""What the client's tests call: a discovery over HTTP, engines, and a server of raw bytes.

Engines are those of the gateway's tests; the discovery answers as a role of the gateway does.
"""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from relax_infer.discovery import InferenceRegistry, etag_of
from tests.gateway.fakes import Engine, registry


async def echo(request: web.Request, payload: dict[str, Any]) -> web.Response:
    return web.json_response({"text": "ok"})


def sent(upstream: Engine) -> dict[str, Any]:
    """The body of the last POST."""
    return json.loads(upstream.posts[-1][1])


class Provider:
    """A role's document that tests change under the client, and how often it was read."""

    def __init__(self, *engines: Engine, **changes: Any) -> None:
        self.document: Any = registry("genrm", *(e.url for e in engines), **changes)
        self.reads = 0
        self.go = asyncio.Event()
        """A read that has begun ends when this is set; it brings what was true when it began."""
        self.go.set()

    async def __call__(self) -> dict[str, Any]:
        self.reads += 1
        document = self.document
        await self.go.wait()
        if isinstance(document, Exception):
            raise document
        return document


@dataclass
class Discovery:
    """A teacher's discovery: what it answers, and the requests that it saw."""

    role_url: str = ""
    registry: InferenceRegistry = field(
        default_factory=lambda: InferenceRegistry("teacher", "epoch-1")
    )
    tags: bool = True
    """Answers ETag, and 304 to a request that has it."""
    status: int = 200
    text: str | None = None
    """Instead of the document."""
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    """Path with query, and If-None-Match, of every request."""
    statuses: list[int] = field(default_factory=list)

    @property
    def reads(self) -> int:
        return len(self.seen)

    def publish(self, *engines: Engine, **changes: Any) -> None:
        """One model ``m`` with these replicas."""
        document = registry("teacher", *(e.url for e in engines), **changes)
        self.registry.publish(document["models"], document["routing"])


@contextlib.asynccontextmanager
async def discovery() -> AsyncIterator[Discovery]:
    """Serves ``GET <role_url>/engines``."""
    state = Discovery()

    async def engines(request: web.Request) -> web.Response:
        state.seen.append((request.path_qs, request.headers.get("If-None-Match")))
        document = state.registry.snapshot()
        tag = etag_of(document)
        headers = {"ETag": tag} if state.tags else {}
        status = state.status
        if status == 200 and state.tags and request.headers.get("If-None-Match") == tag:
            status = 304
        state.statuses.append(status)
        if status != 200:
            return web.Response(status=status, headers=headers | {"Location": "/elsewhere"})
        text = json.dumps(document) if state.text is None else state.text
        return web.Response(text=text, headers=headers, content_type="application/json")

    app = web.Application()
    app.router.add_get("/run/teacher/engines", engines)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    state.role_url = f"http://127.0.0.1:{listener.getsockname()[1]}/run/teacher"
    try:
        yield state
    finally:
        await runner.cleanup()


@dataclass
class RawServer:
    url: str = ""
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)


Say = Callable[[asyncio.StreamWriter, int, int], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw_server(say: Say) -> AsyncIterator[RawServer]:
    """Speaks HTTP/1.1 by hand: ``say(writer, connection, request)`` answers what was read whole.

    Both count from 1; the request's number is within its connection.
    """
    state = RawServer()
    open_ones: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        connection, request = state.connections, 0
        open_ones.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = re.findall(rb"(?i)content-length: *(\d+)", head)
                length = int(lengths[0]) if lengths else 0
                state.requests.append(head + await reader.readexactly(length))
                request += 1
                await say(writer, connection, request)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for writer in open_ones:
            writer.close()
        await server.wait_closed()


def whole(body: bytes) -> bytes:
    """An answer that keeps the connection."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body
