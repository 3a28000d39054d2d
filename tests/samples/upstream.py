"""A small HTTP upstream that answers like an SGLang engine, with faults on demand.

For what no real engine does on command: a 503 in the middle, a malformed answer, other weights.
tests/e2e runs the same phases against real engines.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

PLUS_ONE = -0.5


class Upstream:
    """Answers every request with two tokens, unless ``fault(payload)`` says otherwise."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.payloads: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.fault: Callable[[dict[str, Any]], web.Response | dict[str, Any] | None] = (
            lambda payload: None
        )
        self.weight_version = "3"
        self.output = [3, 1]
        self.hold = asyncio.Event()
        self.hold.set()
        self.in_flight = 0
        self.most_in_flight = 0
        self.url = ""
        self._changed = asyncio.Condition()

    async def reached(self, in_flight: int) -> None:
        """Wait until that many requests are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_flight >= in_flight)

    async def answer(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.asked.append(payload["rid"])
        self.payloads.append(payload)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        async with self._changed:
            self._changed.notify_all()
        try:
            await self.hold.wait()
        finally:
            self.in_flight -= 1
        fault = self.fault(payload)
        if isinstance(fault, web.Response):
            return fault
        return web.json_response(fault if fault is not None else self._good(payload))

    def _good(self, payload: dict[str, Any]) -> dict[str, Any]:
        start = payload.get("logprob_start_len", 0)
        return {
            "text": "x",
            "output_ids": self.output,
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "weight_version": self.weight_version,
                "output_token_logprobs": [[PLUS_ONE, token, None] for token in self.output],
                "input_token_logprobs": [
                    [None if k == 0 else -0.25, token, None]
                    for k, token in enumerate(payload["input_ids"][start:])
                ],
            },
        }


@asynccontextmanager
async def serving() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    app = web.Application()
    app.router.add_post("/{tail:.*}", upstream.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    upstream.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield upstream
    finally:
        await runner.cleanup()
