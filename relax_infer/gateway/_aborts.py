"""Aborts of requests that nobody waits for any more: a few at once, beside the data pool's turns.

A role behind a router is aborted at every engine, for every id: were these requests to take turns
with those of callers, one caller that leaves could hold up all others.

An engine knows a request by its id alone. So none is aborted while another caller's request holds
its id, be it a repeat of the one that was given up; it is once nobody does any more.
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
        self._live: dict[str, int] = {}
        """Requests under way by id."""
        self._owed: dict[str, set[str]] = {}
        """Of those ids, the engines at which one was given up."""

    def hold(self, rids: Iterable[str]) -> None:
        """A request under these ids begins: none of them is aborted before it ends."""
        for rid in rids:
            self._live[rid] = self._live.get(rid, 0) + 1

    def let_go(self, rids: Iterable[str]) -> None:
        """It has ended; once for each :meth:`hold`."""
        for rid in rids:
            if (left := self._live[rid] - 1) > 0:
                self._live[rid] = left
            else:
                del self._live[rid]
                if owed := self._owed.pop(rid, None):
                    self.put(owed, (rid,))

    def put(self, base_urls: Iterable[str], rids: Iterable[str]) -> None:
        """Every id at every engine, soon; those that a request holds, when it has ended."""
        engines = tuple(base_urls)
        for rid in rids:
            if rid in self._live:
                self._owed.setdefault(rid, set()).update(engines)
                continue
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
                engine, rid = self._waiting.popleft()
                if rid in self._live:
                    self._owed.setdefault(rid, set()).add(engine)
                else:
                    await self._send(engine, rid)
        finally:
            self._at_work -= 1
        if self._dropped:
            log.warning("%d aborts were dropped: more than %d waited", self._dropped, WAITING)
            self._dropped = 0
