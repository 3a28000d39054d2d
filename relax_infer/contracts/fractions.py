"""Shares of one GPU that actors reserve with Ray: one check for recipe, planner and actors."""

import math
from typing import Annotated

from pydantic import BeforeValidator, Field


def check_gpu_fraction(value: object) -> float:
    """``value`` as a share of one GPU, from 0 to 1.

    Raises:
        ValueError: it is a bool, a text, None, not finite, or out of range.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and 0 <= number <= 1:
            return number
    raise ValueError("a share of one GPU must be a finite number from 0 to 1")


GpuFraction = Annotated[float, BeforeValidator(check_gpu_fraction), Field(ge=0, le=1)]
