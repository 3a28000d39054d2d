"""How long to wait before the same is asked again of one that does not do it."""

from collections.abc import Iterator

SELDOM_SECONDS = 10.0
"""Between two repeats, at most."""
_GROWS = 1.5


def pauses(first: float) -> Iterator[float]:
    """Seconds, without end. Short at first, when it may only have come too early; later ones are
    half of the time that has passed, until they are :data:`SELDOM_SECONDS`, so that one that never
    does it is not flooded."""
    pause = first
    while True:
        yield pause
        pause = min(pause * _GROWS, SELDOM_SECONDS)
