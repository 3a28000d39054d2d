"""Whoever waits for an answer, and may leave before it has come."""

import asyncio

from relax_infer.gateway._asgi import Receive, Scope
from relax_infer.gateway._protocol import GONE


class Caller:
    """Interrupts the work on a request when its caller leaves."""

    __slots__ = ("_hook", "_receive", "_task", "_watcher", "left")

    def __init__(self, task: "asyncio.Task[object]", scope: Scope, receive: Receive) -> None:
        """``task``: works for the caller."""
        self.left = False
        self._task, self._receive = task, receive
        self._hook = (scope.get("extensions") or {}).get(GONE)
        self._watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """The body has been read: from now on nothing but the end can come from the caller."""
        if self._hook is not None:
            self._hook(self._leave)
        else:  # a server that does not say it by itself
            self._watcher = self._task.get_loop().create_task(self._wait())

    def let_go(self) -> None:
        """The work is done, one way or another."""
        if self._watcher is not None:
            self._watcher.cancel()
        elif self._hook is not None:
            self._hook(None)

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.left = True
        self._task.cancel()
