"""pass@k and what else is said of graded answers. Pure."""

import math
import statistics
from collections.abc import Sequence


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of ``k`` answers to a problem is right.

    The unbiased estimator ``1 - C(samples - right, k) / C(samples, k)`` (Chen et al. 2021,
    arXiv 2107.03374, equation 1): the share of all choices of ``k`` of the samples that hold a
    right one. ``1 - (1 - right / samples) ** k`` would be too low.

    Raises:
        ValueError: not 0 <= right <= samples, or not 1 <= k <= samples.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def standard_error(shares: Sequence[float]) -> float | None:
    """Of the mean of one share for each problem; None of a single problem. Problems are what is
    drawn: answers to one are not independent."""
    if len(shares) < 2:
        return None
    return statistics.stdev(shares) / math.sqrt(len(shares))
