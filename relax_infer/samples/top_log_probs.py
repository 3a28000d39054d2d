"""Log-probs as SGLang writes them, ``[log_prob, token id, …]``, read without any good will.

Pure.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from relax_infer.contracts.failures import PermanentError


def top_log_probs(
    rows: Sequence[Any], sample: str, field: str, top_k: int
) -> Iterator[tuple[list[int], list[float]]]:
    """Ids and log-probs of each row of ``[[log_prob, id, …], …]``, K of each, no id twice."""
    for row in rows:
        pairs = pairs_of(row, sample, field)
        ids = [token for _, token in pairs]
        if len(set(ids)) != top_k or len(ids) != top_k:
            raise PermanentError(f"{sample}: {field} has {len(ids)} tokens in a row, not {top_k}")
        yield ids, [log_prob for log_prob, _ in pairs]


def pairs_of(row: Any, sample: str, field: str) -> list[tuple[float, int]]:
    """One position's tokens; ``sample`` and ``field`` are for the error."""
    if not isinstance(row, list):
        raise PermanentError(f"{sample}: {field} has {row!r} where a row is due")
    return [pair_of(entry, sample, field) for entry in row]


def pair_of(entry: Any, sample: str, field: str) -> tuple[float, int]:
    """A finite log-prob and a token id, of exactly these types."""
    if isinstance(entry, (list, tuple)) and len(entry) >= 2:
        log_prob, token = entry[0], entry[1]
        numeric = isinstance(log_prob, (int, float)) and not isinstance(log_prob, bool)
        if numeric and type(token) is int and token >= 0 and math.isfinite(log_prob):
            return float(log_prob), token
    raise PermanentError(f"{sample}: {field} has {entry!r}, that is no log-prob of a token")
