"""The canary: a short prefill whose log-probs say whether an engine still is what it was.

Version and digest tell which weights are resident; the canary tells that they compute. It runs over
the management socket while the gate is closed, so no caller ever meets an engine that failed it.
"""

import math
from collections.abc import Sequence

from relax_infer.contracts.base import Message
from relax_infer.contracts.failures import PermanentError
from relax_infer.engines.control import EngineControl

PROMPT = (1, 2, 3, 5, 8, 4, 7, 6)
"""Token ids that every vocabulary has."""
TOLERANCE = 0.05
"""Nats that one log-prob may differ; what a kernel or a batch changes is a tenth of it."""


class Canary(Message):
    """Log-probs of :data:`PROMPT` under weights of one digest."""

    digest: str
    log_probs: tuple[float, ...]
    """One per token of the prompt but the first."""


async def take_canary(control: EngineControl, digest: str, timeout: float) -> Canary:
    """The engine's log-probs now.

    Raises:
        PermanentError: one is not a finite number: whatever is resident, it does not compute.
        UnconfirmedError: no answer within ``timeout`` seconds.
    """
    log_probs = await control.log_probs(PROMPT, timeout)
    if len(log_probs) != len(PROMPT) - 1 or not all(math.isfinite(each) for each in log_probs):
        raise PermanentError(
            f"The canary of {control.socket} gave {list(log_probs)}:"
            f" {len(PROMPT) - 1} finite log-probs were due.",
            cure="Its weights or its cache are damaged: it is rebuilt, not sampled from.",
        )
    return Canary(digest=digest, log_probs=tuple(log_probs))


def compare_canaries(known: Canary, now: Canary, tolerance: float = TOLERANCE) -> None:
    """Raises :class:`PermanentError` where the same weights give other log-probs than before.

    Canaries of different weights tell nothing about each other.
    """
    if known.digest != now.digest:
        return
    off = _furthest(known.log_probs, now.log_probs)
    if off > tolerance:
        raise PermanentError(
            f"The canary differs by {off:.4f} nats from the one taken after these weights were"
            f" loaded; {tolerance} are allowed.",
            cure="The engine says the right version and computes something else: it is rebuilt.",
        )


def _furthest(known: Sequence[float], now: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(known, now, strict=True))
