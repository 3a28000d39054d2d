"""Where rewards come from: adapters that say what they can, in one registry."""

import asyncio
import hashlib
import importlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Real

from relax_infer.contracts.failures import PermanentError, RelaxError
from relax_infer.samples.environment import episode_reward
from relax_infer.samples.grading import grader
from relax_infer.samples.sample import Sample
from relax_infer.samples.tasks import Task, Unscored

Rule = Callable[[Sample, Task], float]
"""One sample's reward; raises :class:`Unscored` when there is none."""
AsyncRule = Callable[[Sample, Task], Awaitable[float]]
BatchRule = Callable[[Sequence[Sample], Task], Sequence[float | None]]
"""The rewards of many samples, in order; None where there is none."""
_CONCURRENT = 64
"""Samples that an asynchronous rule works on at once."""


@dataclass(frozen=True)
class RewardAdapter:
    """One source of rewards. At most one of ``rule``, ``async_rule`` and ``batch_rule`` is given.

    Attributes:
        name: what a recipe's ``reward.source`` says.
        supports_deferred: may be used when scoring is deferred until the rollout has let go.
        needs_genrm: rewards come from a GenRM's verdicts, through the judging phase.
        needs_finished: a response that hit its token limit takes ``reward.unfinished`` and is not
            shown to the rule.
        rule: computes a reward from the sample alone.
        async_rule: the same, waiting for something.
        batch_rule: the rewards of all samples of a step together.
    """

    name: str
    supports_deferred: bool
    needs_genrm: bool = False
    needs_finished: bool = False
    rule: Rule | None = None
    async_rule: AsyncRule | None = None
    batch_rule: BatchRule | None = None

    def __post_init__(self) -> None:
        given = [rule for rule in (self.rule, self.async_rule, self.batch_rule) if rule is not None]
        if len(given) + self.needs_genrm > 1:
            raise ValueError(f"reward {self.name}: a reward has one rule, or a GenRM")

    @property
    def is_async(self) -> bool:
        return self.async_rule is not None

    @property
    def batched(self) -> bool:
        return self.batch_rule is not None

    @property
    def by_rule(self) -> bool:
        """Whether a rule of this process gives the rewards."""
        return self.rule is not None or self.is_async or self.batched


@dataclass(frozen=True)
class Score:
    """A reward, or None and the reason why there is none."""

    reward: float | None
    source: str
    detail: str | None = None


_REGISTRY: dict[str, RewardAdapter] = {}


def register_reward(adapter: RewardAdapter) -> RewardAdapter:
    """Make an adapter known; raises ValueError when the name is taken by another."""
    known = _REGISTRY.setdefault(adapter.name, adapter)
    if known != adapter:
        raise ValueError(f"reward {adapter.name} is registered already, as {known}")
    return adapter


def get_reward(name: str) -> RewardAdapter:
    """The adapter of that name; of a name like ``package.module:name``, the one found there."""
    adapter = _REGISTRY.get(name)
    if adapter is not None:
        return adapter
    if ":" in name:
        return _imported(name)
    raise PermanentError(
        f"reward.source {name} is not known",
        cure=f"Known: {', '.join(sorted(_REGISTRY))}; register_reward adds one.",
    )


def _imported(name: str) -> RewardAdapter:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PermanentError(
            f"reward.source {name} cannot be imported: {error}",
            cure="The module must be installed where the workers run.",
        ) from error
    if not isinstance(found, RewardAdapter):
        raise PermanentError(f"reward.source {name} is {type(found).__name__}, no RewardAdapter")
    return found


def require_usable(name: str) -> RewardAdapter:
    """The adapter that a run's ``reward.source`` names, if a run can use it.

    Raises:
        PermanentError: it is unknown, cannot be deferred, or gives no rewards.
    """
    adapter = get_reward(name)
    if not adapter.supports_deferred:
        raise PermanentError(
            f"reward.source {name} cannot be used after the rollout has let go: it does not declare"
            " supports_deferred.",
            cure="Runs score deferred; use another reward, or declare it if it needs no engine.",
        )
    if adapter.needs_genrm and name != "genrm":
        raise PermanentError(f"reward.source {name} wants a GenRM: that is reward.source genrm.")
    if not (adapter.by_rule or adapter.needs_genrm or name == "none"):
        raise PermanentError(f"reward.source {name} has no rule to give rewards by.")
    return adapter


def scores_by_rule(
    adapter: RewardAdapter, samples: Sequence[Sample], task: Task, *, unfinished: float
) -> list[Score]:
    """One score per sample, in order. A rule that raises, or gives no finite number, gives none.

    Call it from a thread without a running event loop.

    Raises:
        PermanentError: a batch rule gave another number of rewards than samples.
    """
    source = f"rule:{adapter.name}"
    scores: dict[int, Score] = {}
    asked: list[int] = []
    for place, sample in enumerate(samples):
        if adapter.needs_finished and not sample.finished:
            scores[place] = Score(unfinished, "rule:unfinished")
        else:
            asked.append(place)
    given = _given(adapter, [samples[place] for place in asked], task)
    for place, reward in zip(asked, given, strict=True):
        scores[place] = _score(reward, source)
    return [scores[place] for place in range(len(samples))]


def _given(adapter: RewardAdapter, samples: list[Sample], task: Task) -> list[object]:
    """What the rule said of each sample: a reward, None, or the exception that it raised."""
    if adapter.batch_rule is not None:
        try:
            given = list(adapter.batch_rule(samples, task))
        except Exception as error:
            return [error] * len(samples)
        if len(given) != len(samples):
            raise PermanentError(
                f"reward {adapter.name} gave {len(given)} rewards for {len(samples)} samples"
            )
        return list(given)
    if adapter.async_rule is not None:
        return asyncio.run(_awaited(adapter.async_rule, samples, task))
    assert adapter.rule is not None
    answers: list[object] = []
    for sample in samples:
        try:
            answers.append(adapter.rule(sample, task))
        except Exception as error:
            answers.append(error)
    return answers


async def _awaited(rule: AsyncRule, samples: list[Sample], task: Task) -> list[object]:
    slots = asyncio.Semaphore(_CONCURRENT)

    async def one(sample: Sample) -> object:
        async with slots:
            return await rule(sample, task)

    return list(await asyncio.gather(*(one(s) for s in samples), return_exceptions=True))


def _score(given: object, source: str) -> Score:
    if isinstance(given, Unscored):
        return Score(None, source, str(given))
    if isinstance(given, RelaxError) or (
        isinstance(given, BaseException) and not isinstance(given, Exception)
    ):
        raise given  # no fault of the sample
    if isinstance(given, Exception):
        return Score(None, source, f"the rule failed: {type(given).__name__}: {given}")
    if given is None:
        return Score(None, source, "the rule gave no score")
    if not isinstance(given, Real):
        return Score(None, source, f"the rule gave no number: {given!r}")
    try:
        reward = float(given)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        return Score(None, source, f"the rule gave no finite number: {reward}")
    return Score(reward, source)


def _exact(sample: Sample, task: Task) -> float:
    """1.0 when the task's own checker accepts the response, else 0.0."""
    return float(task.grade(sample.answer, sample.response_ids, sample.metadata) >= 1.0)


def _own(sample: Sample, task: Task) -> float:
    return task.grade(sample.answer, sample.response_ids, sample.metadata)


def _math_verify(sample: Sample, task: Task) -> float:
    return grader("math_verify").grade({"answer": sample.answer, "text": sample.response})


def _environment(sample: Sample, task: Task) -> float:
    return episode_reward(sample.metadata)


def _coin(sample: Sample, task: Task) -> float:
    """A fair coin by the sample's identity: a negative control that cannot be learned from."""
    identity = f"{sample.run}/{sample.step}/{sample.group}/{sample.sample}"
    return float(hashlib.sha256(identity.encode()).digest()[0] & 1)


register_reward(RewardAdapter("genrm", supports_deferred=True, needs_genrm=True))
register_reward(RewardAdapter("exact", supports_deferred=True, rule=_exact))
register_reward(
    RewardAdapter("reasoning_gym", supports_deferred=True, needs_finished=True, rule=_own)
)
register_reward(
    RewardAdapter("math_verify", supports_deferred=True, needs_finished=True, rule=_math_verify)
)
register_reward(RewardAdapter("environment", supports_deferred=True, rule=_environment))
register_reward(RewardAdapter("random", supports_deferred=True, rule=_coin))
register_reward(RewardAdapter("none", supports_deferred=True))
