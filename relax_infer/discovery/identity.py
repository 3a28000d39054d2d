"""Names and generations of logical replicas: what outlives a process, and what tells of a new one.

Pure.
"""

import re
from collections.abc import Iterable

UNNAMED = "__default__"
"""Stands for the model of a pool that has a single, unnamed instance."""

_RANK = re.compile(r"(?:^|/)(?:group-(\d+)/)?replica-(\d+)$")


def engine_id(model_id: str | None, replica: int, *, rank_offset: int | None = None) -> str:
    """``{model}/replica-{n}``, or ``{model}/group-{rank_offset}/replica-{n}`` in a rollout group.

    The same for as long as the logical replica exists, whatever its workers and address.
    """
    group = "" if rank_offset is None else f"group-{rank_offset}/"
    return f"{UNNAMED if model_id is None else model_id}/{group}replica-{replica}"


def rank_of(engine_id: str) -> int | None:
    """The replica's number among all of its model: group offset plus replica; None: other names."""
    found = _RANK.search(engine_id)
    return None if found is None else int(found[1] or 0) + int(found[2])


class Generations:
    """Counts, per logical replica, the worker sets and head addresses that it has had."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, tuple[str, ...], str | None]] = {}

    def observe(self, engine_id: str, workers: Iterable[str], head_url: str | None) -> int:
        """The replica's generation, from 1: one more when its workers or its address are others.

        Args:
            engine_id: the logical replica.
            workers: identity of each of its workers in rank order, followers included.
            head_url: None while it has no address; that alone is no new generation.
        """
        now = tuple(workers)
        known = self._seen.get(engine_id)
        if known is None:
            self._seen[engine_id] = (1, now, head_url)
            return 1
        generation, before, address = known
        moved = head_url is not None and address is not None and head_url != address
        generation += now != before or moved
        self._seen[engine_id] = (generation, now, head_url or address)
        return generation
