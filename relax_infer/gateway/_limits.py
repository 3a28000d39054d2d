"""What one request may take."""

from dataclasses import dataclass

from relax_infer.gateway._errors import HANG_UP, GatewayError

MOST_IDS = 4096
"""Requests of one body that ``rid`` may name: each is followed, logged and aborted by its name."""
CALLER_LEFT = 499
"""Counted, never sent."""
_READ_AND_DROP = 16
"""A body up to so many times the limit is read and dropped, so that its sender hears why."""


@dataclass(frozen=True)
class Limits:
    """What one request may take."""

    timeout: float = 1800.0
    """Seconds for the whole answer, its stream included."""
    body_bytes: int = 64 << 20
    body_seconds: float = 60.0
    """Until the body has come."""


def too_many_ids(number: int) -> str:
    """Why a body is refused."""
    return f"rid names {number} requests, {MOST_IDS} are the most of one body"


def too_large(limit: int, said: int | None) -> GatewayError:
    """``said``: the body's length, if it is known before it has come."""
    polite = said is not None and said <= _READ_AND_DROP * limit
    text = f"Request body is larger than {limit} bytes"
    return GatewayError(413, text, () if polite else (HANG_UP,))
