"""A small upstream over real HTTP, and a gateway in front of it, both in the test's event loop.

The upstream speaks what a fenced engine speaks of ``/generate``, ``/abort_request`` and
``/health``; each test says how it answers.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from relax_infer.discovery import InferenceRegistry, ModelSnapshot, ReplicaSnapshot, RoutingSpec
from relax_infer.gateway import RegistryIntake, create_control_app, create_gateway_app
from relax_infer.gateway._asgi import App
from relax_infer.gateway.serve import make_server

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Engine:
    """One upstream and what it saw."""

    url: str = ""
    posts: list[tuple[CIMultiDict[str], bytes]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Of the posts."""
    aborts: list[str] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    """Paths of what was asked about the engine itself."""
    info: dict[str, Any] = field(
        default_factory=lambda: {"model_path": "fake", "served_model_name": "policy"}
    )
    closed: list[str] = field(default_factory=list)
    """Request ids whose connection the gateway closed before the answer's end."""
    seen: asyncio.Event = field(default_factory=asyncio.Event)
    """A request is being answered."""


@contextlib.asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[Engine]:
    """Serves ``/generate`` by ``answer``."""
    state = Engine()

    async def generate(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        state.posts.append((CIMultiDict(request.headers), raw))
        state.paths.append(request.path)
        payload = await request.json()
        state.seen.set()
        try:
            return await answer(request, payload)
        except (asyncio.CancelledError, ConnectionResetError):
            state.closed.append(payload.get("rid", ""))
            raise

    async def abort(request: web.Request) -> web.Response:
        state.aborts.append((await request.json())["rid"])
        return web.Response()

    async def well(request: web.Request) -> web.Response:
        state.gets.append(request.path)
        return web.json_response(state.info)

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_post("/abort_request", abort)
    for path in ("/health", "/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        app.router.add_get(path, well)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield state
    finally:
        await runner.cleanup()


@dataclass
class Wire:
    """An upstream that writes bytes as they are, well-formed or not."""

    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    """Head and body of each POST but aborts."""
    aborts: list[str] = field(default_factory=list)
    closed: int = 0
    """Connections that the gateway closed while the script waited for it."""


class Say:
    """A script for :func:`wire`; ``hang_up=False`` leaves closing to the gateway."""

    def __init__(self, *parts: bytes | asyncio.Event | None, hang_up: bool = True) -> None:
        self.parts, self.hang_up = parts, hang_up


@contextlib.asynccontextmanager
async def wire(say: Say) -> AsyncIterator[Wire]:
    """Answers every POST by the script: bytes are written, an event is waited for, and ``None``
    waits until the gateway hangs up."""
    state = Wire()
    writers: list[asyncio.StreamWriter] = []
    serving = set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if head.startswith(b"POST /abort_request"):
                state.aborts.append(json.loads(body)["rid"])
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                state.requests.append(head + body)
                for part in say.parts:
                    if part is None:
                        await reader.read()
                        state.closed += 1
                    elif isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await part.wait()
            if not say.hang_up:
                await reader.read()
                state.closed += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for writer in writers:
            writer.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()


@dataclass
class Gateway:
    url: str
    control: str
    intake: RegistryIntake
    connections: set[Any] = field(default_factory=set)
    """The server's protocols, one for each caller that is connected."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def publish(self, role: str, *engines: str, term: int = 1, **changes: Any) -> dict[str, Any]:
        """Offer a registry of one model ``m`` with these replicas, known there as ``served``."""
        document = registry(role, *engines, **({"served_model_name": "served"} | changes))
        self.intake.offer(role, term, document)
        return document


def registry(role: str, *engines: str, **changes: Any) -> dict[str, Any]:
    """A published document of one model ``m``."""
    replicas = [
        ReplicaSnapshot(
            engine_id=f"m/replica-{n}", base_url=url, state="READY", direct_eligible=True
        )
        for n, url in enumerate(engines)
    ]
    given: dict[str, Any] = {
        "model_id": "m",
        "state": "READY",
        "route_mode": "DIRECT",
        "engines": replicas,
    }
    routing = RoutingSpec(default_model="m", route_key_map={"k": "m"}, aliases={"alias": "m"})
    return InferenceRegistry(role, "epoch").publish([ModelSnapshot(**(given | changes))], routing)


@contextlib.asynccontextmanager
async def gateway(
    *, direct: bool = True, wrap: Callable[[App], App] = lambda app: app, **options: Any
) -> AsyncIterator[Gateway]:
    """The public app and the control app, each on a port of its own.

    ``wrap`` puts routes before those of the app. ``direct``: data routes are answered by the server
    itself, as they are where nothing is traced.
    """
    intake = RegistryIntake()
    app = create_gateway_app(intake, **options)
    servers = [
        make_server(wrap(app), direct=app.direct if direct else None),
        make_server(create_control_app(intake)),
    ]
    sockets = [_listener() for _ in servers]
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, listener in zip(servers, sockets, strict=True)
    ]
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]
    await until(lambda: all(server.started for server in servers))
    try:
        yield Gateway(urls[0], urls[1], intake, servers[0].server_state.connections)
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)


def _listener() -> socket.socket:
    """With its protocol named asyncio switches off Nagle's delay: 40 ms for each answer."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(100)
    return listener


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait for the condition; fails the test at the deadline."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def free_port() -> int:
    """Free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
