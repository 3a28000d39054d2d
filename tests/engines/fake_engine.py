"""An HTTP engine in a few lines, for tests of the fence: it does only what it is told to do.

The real SGLang server is put through the same fence in ``test_real_engine.py``.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.fence import Fence
from relax_infer.engines.request_log import RequestLog, read_request_log

TOKEN = FenceToken(counter=1, grant_id="a")


class FakeEngine:
    """ASGI app and backend in one: ``/generate`` runs until it is released or aborted."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: list[str] = []
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
            self.running[rid].set()

    def abort_all(self) -> None:
        for rid in list(self.running):
            self.abort(rid)

    async def idle(self) -> bool:
        return not self.running and not self.busy_scheduler

    async def flush(self) -> bool:
        return not self.busy_scheduler

    def silent_for(self) -> float:
        return 0.0

    # App

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope["method"], scope["path"]))
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
        payload = json.loads(message["body"])
        await self.deaf_until_started.wait()
        rid, done = payload["rid"], asyncio.Event()
        self.running[rid] = done
        try:
            if payload.get("stream"):
                start = {"type": "http.response.start", "status": 200, "headers": []}
                await send(start)
                await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
            await done.wait()
        finally:
            del self.running[rid]
        if payload.get("stream"):
            await send({"type": "http.response.body", "body": b"data: 2"})
        else:
            await self._reply(send, 200, {"rid": rid, "aborted": rid in self.aborted})

    async def _reply(self, send: Any, status: int, document: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(document).encode()})


class WillingEngine(FakeEngine):
    """Does at once whatever it is asked, as an engine without a fence would."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append((scope.get("method", scope["type"]), scope["path"]))
        await self._reply(send, 200, {"path": scope["path"]})


class FencedFake:
    """A fake engine behind a real fence on two real sockets."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.log_path = folder / "requests.jsonl"
        self.fence = Fence(self.engine, self.engine, RequestLog(self.log_path), TOKEN)
        self.url = ""
        self.socket = folder / "s"

    def log(self) -> list[dict[str, Any]]:
        return list(read_request_log(self.log_path))

    async def until(self, condition: Any) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it did not come to that in 10 s"
            await asyncio.sleep(0.005)


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None: ...


@asynccontextmanager
async def fenced_fake(
    folder: Path, engine: FakeEngine | None = None
) -> AsyncIterator[tuple[FencedFake, aiohttp.ClientSession]]:
    """The fence open under :data:`TOKEN`, and a client."""
    fake = FencedFake(folder, engine)
    # With its protocol named asyncio switches Nagle's delay off, which is 40 ms for each answer.
    public = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    public.bind(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{public.getsockname()[1]}"
    options: dict[str, Any] = {"lifespan": "off", "ws": "none", "interface": "asgi3"}
    options["log_level"] = "warning"
    servers = [
        _Server(uvicorn.Config(fake.fence, **options)),
        _Server(uvicorn.Config(fake.fence.management, uds=str(fake.socket), **options)),
    ]
    tasks = [
        asyncio.create_task(servers[0].serve(sockets=[public])),
        asyncio.create_task(servers[1].serve()),
    ]
    await fake.until(lambda: all(server.started for server in servers))
    fake.fence.gate.open()
    try:
        async with aiohttp.ClientSession(fake.url) as client:
            yield fake, client
    finally:
        for server in servers:
            server.should_exit = server.force_exit = True
        await asyncio.gather(*tasks)
