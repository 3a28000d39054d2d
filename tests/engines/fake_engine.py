"""An HTTP engine in a few lines, for tests of the fence: it does only what it is told to do.

The real SGLang server is put through the same fence in ``test_real_engine.py``.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from relax_infer.contracts.fence import FenceToken
from relax_infer.engines._table import RequestTable, noting
from relax_infer.engines.fence import Fence
from relax_infer.engines.remote import RemoteEngine
from relax_infer.engines.request_log import RequestLog, read_request_log

TOKEN = FenceToken(counter=1, grant_id="a")


class FakeEngine:
    """ASGI app and backend in one: ``/generate`` runs until it is released or aborted.

    It names requests as SGLang does: ``x_0``, ``x_1`` for the prompts of a batch ``x``, an id of
    its own without one, and a fresh one for each sample of ``n > 1``. An abort is by prefix.
    """

    def __init__(self) -> None:
        self.running: RequestTable = RequestTable()
        self.aborted: list[str] = []
        self.killed: set[str] = set()
        self.fault = ""
        self._made = itertools.count()
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.busy_scheduler = False
        self.deaf_until_started = asyncio.Event()
        self.deaf_until_started.set()

    # Backend

    def request_ids(self) -> list[str]:
        return list(self.running)

    def abort(self, rid: str) -> None:
        if rid in self.running:
            self.aborted.append(rid)
            for other in self.running:
                if other.startswith(rid):
                    self.killed.add(other)
                    self.running[other].set()

    def abort_all(self) -> None:
        for rid in list(self.running):
            self.abort(rid)

    noting = staticmethod(noting)

    async def idle(self) -> bool:
        return not self.running and not self.busy_scheduler

    async def flush(self) -> bool:
        return not self.busy_scheduler

    def silent_for(self) -> float:
        return 0.0

    # App

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope["method"], scope["path"]))
        if self.fault == "silence" and scope["method"] == "GET":
            await asyncio.Event().wait()
        if self.fault == "break" and scope["method"] == "GET":
            raise ConnectionError("its scheduler is gone")
        if scope["path"] in ("/generate", "/v1/chat/completions"):
            await self._generate(receive, send)
        elif scope["path"] in ("/server_info", "/model_info"):
            secret = {"model_path": "m", "host": "h", "api_key": "k", "env": {}, "tp_size": 1}
            await self._reply(send, 200, secret)
        else:
            await self._reply(send, 200, {"path": scope["path"]})

    async def _generate(self, receive: Any, send: Any) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        payload = read_lightly(message["body"])
        await self.deaf_until_started.wait()
        rids = self._named(payload)
        if not self.running.keys().isdisjoint(rids):
            await self._reply(send, 400, {"detail": "Duplicate request ID detected"})
            return
        done = asyncio.gather(*(self._run(rid) for rid in rids))
        try:
            if payload.get("stream"):
                start = {"type": "http.response.start", "status": 200, "headers": []}
                await send(start)
                # Of samples nothing but their answer tells the ids.
                told = json.dumps({"meta_info": {"id": rids[0]}}) if len(rids) > 1 else "1"
                parts = [f"data: {told}"] + [f' {{"id": "{rid}"}}' for rid in rids[1:]]
                for part in parts:
                    body = {"type": "http.response.body", "body": part.encode(), "more_body": True}
                    await send(body)
            await done
        finally:
            done.cancel()
        if payload.get("stream"):
            await send({"type": "http.response.body", "body": b"data: 2"})
        else:
            aborted = not self.killed.isdisjoint(rids)
            await self._reply(send, 200, {"rid": rids[0], "aborted": aborted})

    def _named(self, payload: dict[str, Any]) -> list[str]:
        given, prompts = payload.get("rid"), payload.get("text")
        rids = given if isinstance(given, list) else [given or f"made-{next(self._made)}"]
        if isinstance(given, str) and isinstance(prompts, list):
            rids = [f"{given}_{k}" for k in range(len(prompts))]
        if (n := payload.get("sampling_params", {}).get("n", 1)) > 1:
            for rid in rids:  # it looks each up before it makes the samples
                self.running[rid] = asyncio.Event()
                del self.running[rid]
            rids = [f"made-{next(self._made)}" for _ in range(n * len(rids))]
        return rids

    async def _run(self, rid: str) -> None:
        self.running[rid] = done = asyncio.Event()
        try:
            await done.wait()
        finally:
            del self.running[rid]

    async def _reply(self, send: Any, status: int, document: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})


def read_lightly(body: bytes) -> Any:
    """As an engine whose reader has no limit of a number's digits."""
    return json.loads(body, parse_int=lambda digits: int(digits[:99]))


class WillingEngine(FakeEngine):
    """Does at once whatever it is asked, as an engine without a fence would."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope.get("method", scope["type"]), scope["path"]))
        await self._reply(send, 200, {"path": scope["path"]})


class Served:
    """A fake engine as another process's HTTP server: what SGLang's has besides.

    Aborts by id and says how much it does. Where nobody waits for a whole answer any more it ends
    the request, as SGLang does; a stream it goes on with.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.asked: list[tuple[str, str]] = []
        """What was asked of it that is no caller's."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        engine, asked = self._engine, (scope["method"], scope["path"])
        body = (await receive()).get("body", b"")
        match asked:
            case ("POST", "/abort_request"):
                if rid := json.loads(body or b"{}").get("rid"):
                    engine.abort(rid)
                status, document = 200, {}
            case ("GET", "/v1/loads"):
                load = {"num_running_reqs": len(engine.running), "num_waiting_reqs": 0}
                load["num_waiting_reqs"] += engine.busy_scheduler
                status, document = 200, {"loads": [load]}
            case ("POST", "/flush_cache"):
                status, document = 200 if await engine.flush() else 400, {}
            case _:
                await self._pass_on(scope, body, receive, send)
                return
        self.asked.append(asked)
        await engine._reply(send, status, document)

    async def _pass_on(self, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        async def whole() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        rids: list[str] = []
        with noting(rids.append):
            answering = asyncio.create_task(self._engine(scope, whole, send))
        leaving = asyncio.create_task(_left(receive))
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            if scope["method"] == "GET":
                answering.cancel()
            elif not read_lightly(body).get("stream"):
                for rid in rids:
                    self._engine.abort(rid)
        await asyncio.wait([answering])
        if not answering.cancelled():
            answering.result()


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FencedFake:
    """A fake engine behind a real fence on two real sockets.

    ``remote``: the address where another server serves the engine; else it is in this process.
    """

    def __init__(
        self, folder: Path, engine: FakeEngine | None = None, remote: str | None = None
    ) -> None:
        self.engine = engine or FakeEngine()
        self.log_path = folder / "requests.jsonl"
        self.remote = None if remote is None else RemoteEngine(remote)
        behind = self.remote or self.engine
        self.fence = Fence(
            behind, behind, RequestLog(self.log_path), TOKEN, drained=self.remote is None
        )
        self.url = ""
        self.socket = folder / "s"

    def log(self) -> list[dict[str, Any]]:
        return list(read_request_log(self.log_path))

    async def until(self, condition: Any) -> None:
        await _until(condition)


async def _until(condition: Any) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to that in 10 s"
        await asyncio.sleep(0.005)


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None: ...


_OPTIONS: dict[str, Any] = {
    "lifespan": "off",
    "ws": "none",
    "interface": "asgi3",
    "log_level": "warning",
}


class Servers:
    """ASGI apps, each on a socket of its own; all end together."""

    def __init__(self) -> None:
        self._servers: list[_Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, app: Any, path: Path | None = None) -> str:
        """On a free port, whose address comes, or on a Unix socket."""
        listener, url = None, ""
        if path is None:
            # With its protocol named asyncio switches Nagle's delay off: 40 ms for each answer.
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(uvicorn.Config(app, uds=None if path is None else str(path), **_OPTIONS))
        self._servers.append(server)
        serving = server.serve(sockets=None if listener is None else [listener])
        self._tasks.append(asyncio.create_task(serving))
        await _until(lambda: server.started)
        return url

    async def end(self) -> None:
        for server in self._servers:
            server.should_exit = server.force_exit = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """One app on a free port."""
    servers = Servers()
    try:
        yield await servers.serve(app)
    finally:
        await servers.end()


@asynccontextmanager
async def fenced_fake(
    folder: Path, engine: FakeEngine | None = None, *, remote: bool = False
) -> AsyncIterator[tuple[FencedFake, aiohttp.ClientSession]]:
    """The fence open under :data:`TOKEN`, and a client.

    ``remote``: the engine is asked over HTTP, as the guard of one that others launched does it.
    """
    engine, servers = engine or FakeEngine(), Servers()
    willing = isinstance(engine, WillingEngine)
    address = await servers.serve(engine if willing else Served(engine)) if remote else None
    fake = FencedFake(folder, engine, address)
    try:
        fake.url = await servers.serve(fake.fence)
        await servers.serve(fake.fence.management, fake.socket)
        if willing:  # it says of nothing that it is idle
            fake.fence.gate.confirm_backend_drained()
        elif remote:
            await fake.fence.confirm_drained(TOKEN)
        fake.fence.gate.open()
        async with aiohttp.ClientSession(fake.url) as client:
            yield fake, client
    finally:
        if fake.remote is not None:
            await fake.remote.close()
        await servers.end()
