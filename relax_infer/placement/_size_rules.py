"""Sizes that no cluster has: told before anything is laid out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relax_infer.config import Recipe
from relax_infer.config.placed import MOST_GPUS, Scalar
from relax_infer.placement._demands import Demand, deferred_roles, mode_of
from relax_infer.placement.placed import POOL, TrainingPlacement, Violation

_SIZE = "gpus_per_replica"
_RANKS = {
    "trainer": "train.ranks",
    "critic": "critic.ranks",
    "reference": "reference.ranks",
    "actor_fwd": "actor_fwd.ranks",
}


@dataclass
class _Part:
    """Counts that multiply to GPUs, by their dotted keys."""

    counts: dict[str, int]
    node: int
    """GPUs of a node: an engine that is larger has whole ones."""

    @property
    def gpus(self) -> int:
        return math.prod(self.counts.values())

    def lower(self, excess: int) -> str:
        """Its first count that is more than 1: as low as it has to be without ``excess`` GPUs."""
        key = next(key for key, count in self.counts.items() if count > 1)
        left = (self.gpus - excess) * self.counts[key] // self.gpus
        if key.endswith(_SIZE):
            left -= left % self.node
        self.counts[key] = max(1, left)
        return key


def size_violations(
    recipe: Recipe, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> list[Violation]:
    """What holds more GPUs at the same time than any cluster has: its largest parts, as many as
    have to be lowered."""
    rules: dict[str, str] = {}
    settings: dict[str, int] = {}
    for parts in _at_once(recipe, demands, training):
        while (total := sum(part.gpus for part in parts)) > MOST_GPUS:
            largest = max(parts, key=lambda part: part.gpus)
            rule = (
                f"it alone makes {largest.gpus} GPUs, all at the same time {total}; a cluster has"
                f" {MOST_GPUS} at most."
            )
            key = largest.lower(total - MOST_GPUS)
            rules.setdefault(key, rule)
            settings[key] = largest.counts[key]
    return [
        Violation(key, rule, f"Lower it to {settings[key]} or less.", ((key, settings[key]),))
        for key, rule in rules.items()
    ]


def raised(
    recipe: Recipe, needed: int, cure: str, otherwise: str, demands: Sequence[Demand]
) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    """Cure and settings where ``needed`` GPUs are: a larger cluster, or smaller engines where none
    is so large."""
    if needed <= MOST_GPUS:
        return cure, (("cluster.gpus", needed),)
    largest = _part(recipe, max(demands, key=lambda demand: demand.num_gpus))
    key = largest.lower(needed - MOST_GPUS)
    return otherwise, ((key, largest.counts[key]),)


def _at_once(
    recipe: Recipe, demands: Sequence[Demand], training: Sequence[TrainingPlacement]
) -> list[list[_Part]]:
    """What is on GPUs at the same time. The turns of a layout script are its own to judge: here
    each role is alone."""
    parts = {demand.field: _part(recipe, demand) for demand in demands}
    ranks = {t.role: _Part({_RANKS[t.role]: t.num_gpus}, 1) for t in training}
    if mode_of(recipe) == "decoupled":
        mine = [parts[d.field] for d in demands if d.role == "rollout"]
        others = [parts[d.field] for d in demands if d.role != "rollout"]
        budget = recipe.rollout.num_gpus or 0
        if mine and budget > sum(part.gpus for part in mine):
            mine = [_Part({"rollout.num_gpus": budget}, 1)]
        return [[*mine, *others, *ranks.values()]]
    always = [ranks[t.role] for t in training if t.pool != POOL]
    late = deferred_roles(recipe)
    if recipe.layout is not None:
        turns = [[parts[d.field]] for d in demands]
    else:
        turns = [[parts[d.field] for d in demands if d.role not in late]]
        turns += [[parts[d.field] for d in demands if d.role == role] for role in late]
    turns += [[ranks[t.role]] for t in training if t.pool == POOL]
    together = [always + turn for turn in turns]
    return sorted(together, key=lambda parts: -sum(part.gpus for part in parts))


def _part(recipe: Recipe, demand: Demand) -> _Part:
    counts = {"replicas": demand.replicas, _SIZE: demand.gpus_per_replica}
    node = recipe.cluster.gpus_per_node or recipe.cluster.gpus
    return _Part({f"{demand.field}.{name}": count for name, count in counts.items()}, node)
