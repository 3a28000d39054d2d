"""Which requests in an engine's table came there for which caller.

SGLang makes ids of its own: for a request without one, for every sample of ``n > 1`` and, from a
batch's one id, for each of its prompts. Only they can be aborted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_note: ContextVar[Callable[[str], None] | None] = ContextVar("note", default=None)


class RequestTable(dict[str, Any]):
    """An engine's table of requests by id. What is put in is told to whoever is :func:`noting` in
    the task that does it, or in one that started it."""

    def __setitem__(self, rid: str, state: Any) -> None:
        if (note := _note.get()) is not None:
            note(rid)
        super().__setitem__(rid, state)

    def update(self, *args: Any, **more: Any) -> None:
        for rid, state in dict[str, Any](*args, **more).items():
            self[rid] = state


@contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """``note`` is told the ids that come into a table from here on in this task."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)
