"""One time limit for many: a timer for each request is a good part of what a request costs."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Clock(Generic[T]):
    """Calls ``late`` for each whose time is over. All have the same time, so they are late in the
    order in which they were started, and one timer, for the first of them, is enough."""

    def __init__(self, seconds: float, late: Callable[[T], object]) -> None:
        self.seconds = seconds
        self._late = late
        self._since: dict[T, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, item: T) -> None:
        """From now; again for one that runs already."""
        loop = self._loop or asyncio.get_running_loop()
        self._since.pop(item, None)
        self._since[item] = loop.time()
        if self._timer is None:
            self._loop = loop
            self._timer = loop.call_later(self.seconds, self._look)

    def stop(self, item: T) -> None:
        """It has ended in time, or was not started at all."""
        self._since.pop(item, None)

    def running(self) -> list[T]:
        """Everyone, the oldest first."""
        return list(self._since)

    def _look(self) -> None:
        assert self._loop is not None
        now, following = self._loop.time(), None
        try:  # whoever is late may be started again: the timer that runs is still theirs
            while self._since:
                item, since = next(iter(self._since.items()))
                if now < since + self.seconds:
                    following = self._loop.call_at(since + self.seconds, self._look)
                    return
                del self._since[item]
                self._late(item)
        finally:
            self._timer = following
