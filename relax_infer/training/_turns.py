"""Asking twice for one thing: the second asker joins, or gets the recorded answer."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Joined(Generic[T]):
    """One running task per key, and the answers of the newest keys.

    A failure is not recorded: who asks again after it, tries again. An asker that goes away
    cancels nothing.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._running: dict[Hashable, asyncio.Task[T]] = {}
        self._answers: dict[Hashable, T] = {}

    async def ask(self, key: Hashable, carry_out: Callable[[], Awaitable[T]]) -> T:
        if key in self._answers:
            return self._answers[key]
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._run(key, carry_out))
        return await asyncio.shield(task)

    async def _run(self, key: Hashable, carry_out: Callable[[], Awaitable[T]]) -> T:
        try:
            answer = await carry_out()
        finally:
            del self._running[key]
        self._answers[key] = answer
        while len(self._answers) > self._keep:
            del self._answers[next(iter(self._answers))]
        return answer
