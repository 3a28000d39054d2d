"""A router in a few lines, for what :class:`RouterAdapter` rests on; no request passes through it.

It behaves as sglang-router 0.3.2 was seen to: every change is answered with 202 and queued, also
one that comes to nothing; a worker is listed once its engine answers; an addition under way is not
ended by a removal. ``test_router.py`` puts both through the same tests.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

LOOK_SECONDS = 0.02


class RouterDouble:
    """Its list of workers, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, str]] = []
        """Method and worker's address of each change."""
        self._ids: dict[str, str] = {}
        self._healthy: dict[str, bool] = {}
        self._adding: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listing(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": [self._shown(url) for url in self._healthy]})

    async def add(self, request: web.Request) -> web.Response:
        url = (await request.json())["url"]
        self.asked.append(("POST", url))
        identity = self._ids.setdefault(url, f"id-{len(self._ids)}")
        if url not in self._adding and url not in self._healthy:
            self._adding.add(url)
            self._start(self._add(url))
        return web.json_response({"status": "accepted", "worker_id": identity}, status=202)

    async def remove(self, request: web.Request) -> web.Response:
        identity = request.match_info["id"]
        url = next((url for url, known in self._ids.items() if known == identity), None)
        if url is None:
            return web.json_response({"error": "not found"}, status=404)
        self.asked.append(("DELETE", url))
        self._start(self._remove(url))
        return web.json_response({"status": "accepted"}, status=202)

    async def watch(self) -> None:
        while True:
            for url in list(self._healthy):
                well = await _well(url)
                if url in self._healthy:
                    self._healthy[url] = well
            await asyncio.sleep(LOOK_SECONDS)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _add(self, url: str) -> None:
        while not await _well(url):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        self._adding.discard(url)
        self._healthy[url] = True

    async def _remove(self, url: str) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        if self._healthy.pop(url, None) is not None:
            del self._ids[url]

    def _shown(self, url: str) -> dict[str, Any]:
        return {"id": self._ids[url], "url": url, "is_healthy": self._healthy[url]}

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _well(url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/health") as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


@contextlib.asynccontextmanager
async def router_double(port: int = 0) -> AsyncIterator[RouterDouble]:
    """One that starts without workers; on ``port``, or on a free one."""
    double = RouterDouble()
    app = web.Application()
    app.router.add_get("/workers", double.listing)
    app.router.add_post("/workers", double.add)
    app.router.add_delete("/workers/{id}", double.remove)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", port))
    await web.SockSite(runner, listener).start()
    double.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    watching = asyncio.create_task(double.watch())
    try:
        yield double
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await double.stop()
        await runner.cleanup()
