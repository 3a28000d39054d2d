"""A role's snapshot, read at most once per time to live however many callers ask at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from relax_infer.discovery.schema import RoleSnapshot


@dataclass(frozen=True)
class Known:
    """What a read brought; the next one may be made conditional on it."""

    snapshot: RoleSnapshot
    etag: str | None = None
    """None: the discovery gives no entity tags."""


@dataclass(frozen=True)
class Reading:
    """One finished read."""

    number: int
    """Reads are numbered from 1 in the order in which they began."""
    snapshot: RoleSnapshot
    until: float
    """When it expires, on the reader's clock."""


@dataclass(frozen=True)
class _Failure:
    number: int
    error: Exception
    traceback: TracebackType | None


class SnapshotReader:
    """Caches a snapshot; callers that wait for the same read share its result or its error.

    What was known is forgotten before it is read again, so that a read that fails leaves no address
    behind. A caller that is cancelled takes only its own read with it.
    """

    def __init__(
        self,
        fetch: Callable[[Known | None], Awaitable[Known]],
        ttl: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            fetch: one read; is given what the last one brought, unless that one failed.
            ttl: seconds for which a reading serves; 0: each caller's began after it asked.
            clock: seconds.
        """
        self._fetch, self._ttl, self._clock = fetch, ttl, clock
        self._reading = asyncio.Lock()
        self._begun = 0
        self._void = 0
        """Readings up to this number serve nobody but who read them."""
        self._kept: Reading | None = None
        self._known: Known | None = None
        self._failed: _Failure | None = None

    async def latest(self) -> Reading:
        """Not older than the time to live."""
        fresh = self._fresh()
        if fresh is not None:
            return fresh
        joins = self._ttl > 0 and self._reading.locked()
        since = self._begun if joins else self._begun + 1
        async with self._reading:
            return self._fresh() or self._shared(since) or await self._read()

    async def newer(self, than: Reading | None = None) -> Reading:
        """From a read that began after that one did; None: after this call."""
        since = (self._begun if than is None else than.number) + 1
        async with self._reading:
            return self._shared(since) or await self._read()

    def forget(self) -> None:
        """What was read, or is being read, is not to be relied on by who asks from now on."""
        self._void, self._kept = self._begun, None

    def _fresh(self) -> Reading | None:
        kept = self._kept
        return kept if kept is not None and self._clock() < kept.until else None

    def _shared(self, since: int) -> Reading | None:
        """What another caller's read brought while this one waited; raises what it raised."""
        if self._kept is not None and self._kept.number >= since:
            return self._kept
        failed = self._failed
        if failed is not None and failed.number >= since:
            raise failed.error.with_traceback(failed.traceback)
        return None

    async def _read(self) -> Reading:
        self._begun += 1
        number, known = self._begun, self._known
        self._kept = self._known = self._failed = None
        try:
            known = await self._fetch(known)
        except Exception as error:
            self._failed = _Failure(number, error, error.__traceback__)
            raise
        self._known = known
        reading = Reading(number, known.snapshot, self._clock() + self._ttl)
        if number > self._void:
            self._kept = reading
        return reading
