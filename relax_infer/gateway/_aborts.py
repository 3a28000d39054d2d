"""Aborts of requests that nobody waits for any more: a few at once, beside the data pool's turns.

A role behind a router is aborted at every engine, for every id: were these requests to take turns
with those of callers, one caller that leaves could hold up all others.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger(__name__)

AT_ONCE = 16
WAITING = 16_384
"""Aborts that may wait; of more the oldest are dropped, whose requests end by themselves."""
_AT_THE_END = 5.0
"""Seconds for those under way when the gateway ends."""


class Aborts:
    """Sends best effort. ``send`` takes an engine's address and a request's id and never raises."""

    def __init__(self, send: Callable[[str, str], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: deque[tuple[str, str]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._at_work = 0
        """Senders that look for more; a task that has ended is a sender for a moment longer."""
        self._dropped = 0

    def put(self, base_urls: Iterable[str], rids: Iterable[str]) -> None:
        """Every id at every engine, soon."""
        engines = tuple(base_urls)
        for rid in rids:
            for engine in engines:
                if len(self._waiting) >= WAITING:
                    self._waiting.popleft()
                    self._dropped += 1
                self._waiting.append((engine, rid))
        for _ in range(min(AT_ONCE - self._at_work, len(self._waiting))):
            self._at_work += 1
            sender = asyncio.create_task(self._drain())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def close(self) -> None:
        """Send what waits, as long as the gateway may take to end."""
        if self._senders:
            _, late = await asyncio.wait(self._senders, timeout=_AT_THE_END)
            for sender in late:
                sender.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._waiting.clear()

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._send(*self._waiting.popleft())
        finally:
            self._at_work -= 1
        if self._dropped:
            log.warning("%d aborts were dropped: more than %d waited", self._dropped, WAITING)
            self._dropped = 0
