"""A time limit on what a task does, for a path where ``asyncio.timeout`` is a good part of it."""

import asyncio
from types import TracebackType


class Deadline:
    """Interrupts the task that entered it when its time is over, which comes out as TimeoutError.

    As ``asyncio.timeout``: somebody else's cancellation at the same moment goes first.
    """

    __slots__ = ("_cancelling", "_over", "_task", "_timer")

    def __init__(self, task: "asyncio.Task[object]", seconds: float) -> None:
        """``task``: the current one."""
        self._task = task
        self._over = False
        self._cancelling = task.cancelling()
        self._timer = task.get_loop().call_later(seconds, self._interrupt)

    def move(self, seconds: float) -> None:
        """So long from now instead."""
        if not self._over:
            self._timer.cancel()
            self._timer = self._task.get_loop().call_later(seconds, self._interrupt)

    def __enter__(self) -> "Deadline":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if (
            self._over
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def _interrupt(self) -> None:
        self._over = True
        self._task.cancel()
