"""Where rewards come from: adapters that say what they can, in one registry."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.sample import Sample
from relax_infer.samples.tasks import Task

Rule = Callable[[Sample, Task], float]


@dataclass(frozen=True)
class RewardAdapter:
    """One source of rewards.

    Attributes:
        name: what a recipe's ``reward.source`` says.
        supports_deferred: may be used when scoring is deferred until the rollout has let go.
        needs_genrm: rewards come from a GenRM's verdicts, through the judging phase.
        rule: computes a reward from the sample alone; None when a model is asked.
    """

    name: str
    supports_deferred: bool
    needs_genrm: bool = False
    rule: Rule | None = None


_REGISTRY: dict[str, RewardAdapter] = {}


def register_reward(adapter: RewardAdapter) -> RewardAdapter:
    """Make an adapter known; raises ValueError when the name is taken by another."""
    known = _REGISTRY.setdefault(adapter.name, adapter)
    if known != adapter:
        raise ValueError(f"reward {adapter.name} is registered already, as {known}")
    return adapter


def get_reward(name: str) -> RewardAdapter:
    """The adapter of that name."""
    adapter = _REGISTRY.get(name)
    if adapter is None:
        raise PermanentError(
            f"reward.source {name} is not known",
            cure=f"Known: {', '.join(sorted(_REGISTRY))}; register_reward adds one.",
        )
    return adapter


def _exact(sample: Sample, task: Task) -> float:
    """1.0 when the task's own checker accepts the response, else 0.0."""
    return float(task.check(sample.answer, sample.response_ids))


def _coin(sample: Sample, task: Task) -> float:
    """A fair coin by the sample's identity: a negative control that cannot be learned from."""
    identity = f"{sample.run}/{sample.step}/{sample.group}/{sample.sample}"
    return float(hashlib.sha256(identity.encode()).digest()[0] & 1)


register_reward(RewardAdapter("genrm", supports_deferred=True, needs_genrm=True))
register_reward(RewardAdapter("exact", supports_deferred=True, rule=_exact))
register_reward(RewardAdapter("random", supports_deferred=True, rule=_coin))
register_reward(RewardAdapter("none", supports_deferred=True))
