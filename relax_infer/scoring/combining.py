"""Several judges' scores of one sample as one reward. Pure."""

import math
from collections.abc import Mapping

from relax_infer.config.scoring import Combine


def combine(scores: Mapping[str, float | None], rule: Combine) -> float | None:
    """The reward; None as soon as one judge has no score: the others do not stand in for it.

    ``all`` is 1.0 when every judge gave at least ``rule.passes``, else 0.0; ``weighted`` is the
    mean by ``rule.weights``.

    Raises:
        ValueError: there is no judge, or ``weighted`` lacks a judge's weight.
    """
    if not scores:
        raise ValueError("there is no score to combine")
    given = {judge: score for judge, score in scores.items() if score is not None}
    if len(given) < len(scores) or not all(map(math.isfinite, given.values())):
        return None
    match rule.rule:
        case "mean":
            return math.fsum(given.values()) / len(given)
        case "min":
            return min(given.values())
        case "max":
            return max(given.values())
        case "all":
            return float(all(score >= rule.passes for score in given.values()))
        case "weighted":
            if missing := sorted(set(given) - set(rule.weights)):
                raise ValueError(f"reward.combine.weights lacks {', '.join(missing)}")
            total = math.fsum(rule.weights[judge] for judge in given)
            return math.fsum(rule.weights[judge] * given[judge] for judge in given) / total
