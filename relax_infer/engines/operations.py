"""Operations that are carried out once, however often they are asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from relax_infer.contracts.failures import PermanentError

T = TypeVar("T")


class OperationTable(Generic[T]):
    """Operation id → one shared task.

    Who asks with a known id joins the running task or gets the recorded result or exception.
    An asker that goes away cancels nothing. The newest ``keep`` finished operations are kept.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._tasks: dict[str, tuple[str, asyncio.Task[T]]] = {}

    async def run(self, operation_id: str, kind: str, start: Callable[[], Awaitable[T]]) -> T:
        """Raises :class:`PermanentError` if the id was used for another kind of operation."""
        known = self._tasks.get(operation_id)
        if known is None:

            async def carry_out() -> T:
                return await start()

            known = self._tasks[operation_id] = (kind, asyncio.create_task(carry_out()))
            self._forget()
        recorded, task = known
        if recorded != kind:
            raise PermanentError(
                f"Operation {operation_id} is known as {recorded}, asked for as {kind}.",
                cure="Give every operation an id of its own.",
            )
        return await asyncio.shield(task)

    def _forget(self) -> None:
        finished = [key for key, (_, task) in self._tasks.items() if task.done()]
        for key in finished[: max(0, len(finished) - self._keep)]:
            del self._tasks[key]
