"""Shares of one GPU that actors reserve with Ray: one check for recipe, planner and actors."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field

STEPS = 10_000
"""Of a GPU: Ray counts in these."""


def check_gpu_fraction(value: object) -> float:
    """``value`` as a share of one GPU, from 0 to 1.

    Raises:
        ValueError: it is a bool, a text, None, not finite, or out of range.
    """
    given = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if given == 0 or 1 / STEPS <= given <= 1:
        return float(given)
    raise ValueError(
        f"a share of one GPU must be a finite number from 0 to 1, in Ray's steps of {1 / STEPS}"
    )


def ray_steps(share: float) -> int:
    """What Ray counts of a share, in steps of 1/10,000: it rounds to the nearest."""
    return math.floor(share * STEPS + 0.5)


GpuFraction = Annotated[float, BeforeValidator(check_gpu_fraction), Field(ge=0, le=1)]
