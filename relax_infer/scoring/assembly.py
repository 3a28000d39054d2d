"""Write-back: scores joined to their samples in a new file, once every channel is valid."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.batch import WriteBackResult
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples import layout
from relax_infer.samples.sample import Sample, from_table, to_table
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task
from relax_infer.scoring.rewards import get_reward

_Key = tuple[int, int]
NAMED = 5
"""Faulty samples that an error names before it only counts."""


def write_back(
    store: StagingStore,
    step: int,
    *,
    generated: StagedRef,
    judged: StagedRef | None,
    taught: StagedRef | None,
    task: Task,
    recipe: Recipe,
) -> WriteBackResult:
    """Join rewards and teacher log-probs to the samples; earlier files are never changed.

    A sample without a score fails the batch, or its group is dropped with the reason, as
    ``reward.on_unscored`` says; it never gets a number. Prompts issued = kept + dropped.

    Raises:
        PermanentError: names the samples and the field that is missing or wrong.
    """
    samples = from_table(store.read_table(generated))
    rewards = _channel(store, judged, samples)
    teachings = _channel(store, taught, samples)
    scored = [
        _with_scores(sample, rewards, teachings, task, recipe.reward.source) for sample in samples
    ]
    dropped: dict[int, str] = {}
    if recipe.reward.source != "none":
        dropped = _unscored_groups(scored, recipe)
    kept = [sample for sample in scored if sample.group not in dropped]
    groups = {sample.group for sample in samples}
    if {sample.group for sample in kept} | set(dropped) != groups:
        raise PermanentError(f"step {step}: a group was neither kept nor dropped")
    if not kept:
        raise PermanentError(
            f"step {step}: every group was dropped: {dict(Counter(dropped.values()))}"
        )
    validate_scores(
        kept, needs_reward=recipe.reward.source != "none", needs_teacher=recipe.distilled
    )
    return WriteBackResult(
        staged=store.write_table(layout.scored(step), to_table(kept)),
        dropped_groups=len(dropped),
        drop_reasons=dict(Counter(dropped.values())),
    )


def validate_scores(samples: Iterable[Sample], *, needs_reward: bool, needs_teacher: bool) -> None:
    """Every required channel is there, finite and aligned with the response.

    Raises:
        PermanentError: names the first faulty samples and their fields, and counts the rest.
    """
    faults: list[str] = []
    for sample in samples:
        faults.extend(_faults(sample, needs_reward, needs_teacher))
    if faults:
        more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise PermanentError("; ".join(faults[:NAMED]) + more)


def _faults(sample: Sample, needs_reward: bool, needs_teacher: bool) -> list[str]:
    faults: list[str] = []
    if needs_reward and (sample.reward is None or not math.isfinite(sample.reward)):
        faults.append(f"{sample.name}: reward is {sample.reward}")
    channels: dict[str, tuple[float, ...] | None] = {"rollout_log_probs": sample.rollout_log_probs}
    if needs_teacher:
        channels["teacher_log_probs"] = sample.teacher_log_probs
    for name, values in channels.items():
        if values is None:
            faults.append(f"{sample.name}: {name} is missing")
        elif len(values) != len(sample.response_ids):
            faults.append(
                f"{sample.name}: {name} has {len(values)} entries for"
                f" {len(sample.response_ids)} tokens"
            )
        elif not all(math.isfinite(value) for value in values):
            faults.append(f"{sample.name}: {name} is not finite")
    if len(sample.loss_mask) != len(sample.response_ids):
        faults.append(f"{sample.name}: loss_mask is not aligned with the response")
    return faults


def _channel(
    store: StagingStore, staged: StagedRef | None, samples: list[Sample]
) -> dict[_Key, dict[str, Any]] | None:
    """A score file by identity; it must speak of exactly the generated samples."""
    if staged is None:
        return None
    rows = store.read_table(staged).to_pylist()
    by_identity = {(row["group"], row["sample"]): row for row in rows}
    expected = {(sample.group, sample.sample) for sample in samples}
    if set(by_identity) != expected or len(rows) != len(expected):
        missing = sorted(expected - set(by_identity))[:NAMED]
        raise PermanentError(
            f"{staged.uri} has {len(rows)} rows for {len(expected)} samples; missing (group,"
            f" sample): {missing}"
        )
    for row in rows:
        if (row["run"], row["step"]) != (samples[0].run, samples[0].step):
            raise PermanentError(f"{staged.uri} holds scores of {row['run']} step {row['step']}")
    return by_identity


def _with_scores(
    sample: Sample,
    rewards: dict[_Key, dict[str, Any]] | None,
    teachings: dict[_Key, dict[str, Any]] | None,
    task: Task,
    source: str,
) -> Sample:
    scores: dict[str, Any] = {}
    key = (sample.group, sample.sample)
    adapter = get_reward(source)
    if rewards is not None:
        scores = {k: rewards[key][k] for k in ("reward", "reward_source", "reward_detail")}
    elif adapter.rule is not None:
        scores = {"reward": adapter.rule(sample, task), "reward_source": f"rule:{adapter.name}"}
    if teachings is not None:
        given = teachings[key]["teacher_log_probs"]
        scores["teacher_log_probs"] = None if given is None else tuple(given)
    return sample.model_copy(update=scores)


def _unscored_groups(samples: list[Sample], recipe: Recipe) -> dict[int, str]:
    """Groups with a sample that has no reward, and why; an error when the recipe drops none."""
    unscored = [sample for sample in samples if sample.reward is None]
    if unscored and recipe.reward.on_unscored == "fail":
        named = "; ".join(f"{s.name}: {s.reward_detail or 'no reward'}" for s in unscored[:NAMED])
        raise PermanentError(
            f"{len(unscored)} samples have no score: {named}",
            cure="Mend the judge and retry the step, or set reward.on_unscored to drop_group.",
        )
    return {s.group: (s.reward_detail or "no reward").partition(":")[0] for s in unscored}
