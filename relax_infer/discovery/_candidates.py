"""A model's callable replicas, ready to be chosen from again and again."""

import hashlib
import json
from functools import lru_cache

from relax_infer.discovery.schema import ModelSnapshot, ReplicaSnapshot

KEYS_REMEMBERED = 16384
"""Affinity keys per model whose winner is remembered; the least recently used goes first."""


class Candidates:
    """The READY, eligible replicas of one model in one snapshot, in engine_id order.

    The winner for an affinity key depends on names alone, so it is remembered for as long as the
    same replicas are callable, over new addresses, generations and revisions.
    """

    def __init__(self, role: str, model: ModelSnapshot, before: "Candidates | None" = None) -> None:
        """``before``: what the last snapshot had for this role and model."""
        self.replicas: tuple[ReplicaSnapshot, ...] = tuple(
            e for e in model.engines if e.direct_eligible and e.base_url is not None
        )
        ids = [e.engine_id for e in self.replicas]
        if before is not None and before._ids == ids:
            self._ids, self._winner = before._ids, before._winner
        else:
            self._ids = ids
            self._winner = lru_cache(KEYS_REMEMBERED)(_Rendezvous(role, model.model_id, ids))

    def of(self, affinity_key: str) -> ReplicaSnapshot:
        """The replica that the key sticks to; there must be one."""
        return self.replicas[self._winner(affinity_key)]


class _Rendezvous:
    """Highest random weight: address, generation and order play no part in the choice.

    A replica's weight is the SHA-256 of the compact JSON array
    ``[role, model_id, affinity_key, engine_id]``, so that everybody chooses alike.
    Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """

    def __init__(self, role: str, model_id: str, engine_ids: list[str]) -> None:
        self._head = f"[{json.dumps(role)},{json.dumps(model_id)},"
        self._tails = [f",{json.dumps(engine_id)}]".encode() for engine_id in engine_ids]

    def __call__(self, affinity_key: str) -> int:
        begun = hashlib.sha256((self._head + json.dumps(affinity_key)).encode()).copy
        winner, heaviest = 0, b""
        for number, tail in enumerate(self._tails):
            weight = begun()  # at a thousand replicas this loop is the whole cost of a choice
            weight.update(tail)
            digest = weight.digest()
            if digest > heaviest:
                winner, heaviest = number, digest
        return winner
