"""What an activity at work tells: the details of its next heartbeats."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_told: ContextVar[list[object] | None] = ContextVar("told", default=None)


@contextmanager
def told() -> Iterator[list[object]]:
    """The details of the activity that runs inside, as it last told them."""
    details: list[object] = []
    token = _told.set(details)
    try:
        yield details
    finally:
        _told.reset(token)


def teller() -> Callable[..., None]:
    """A function that any thread may call to tell how far the activity is."""
    details = _told.get()

    def tell(*news: object) -> None:
        if details is not None:
            details[:] = news

    return tell
