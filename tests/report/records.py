"""Records and samples of a run that never was."""

from typing import Any

import pyarrow as pa

from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.recovery import RecoveryTrace
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.run import (
    BatchMetrics,
    Evaluation,
    PhaseRetry,
    PhaseTime,
    SetEvaluation,
    StepRecord,
    StepResult,
)
from relax_infer.contracts.training import TrainResult
from relax_infer.machines import RecoveryState, StepPhase
from relax_infer.samples import StagingStore
from relax_infer.samples.sample import SCHEMA

RUN = "run-<7>"
BEGAN = 1_700_000_000.0

HELD = (
    (0.0, "rollout", "GRANTED", "ONLOADING"),
    (1.0, "rollout", "ONLOAD_CONFIRMED", "ACTIVE"),
    (3.0, "rollout", "OPERATION_FAILED", "BLOCKED"),
    (5.0, "rollout", "RELEASE_PROVED", "SLEEPING"),
)
"""Seconds into the step, role, event and state."""


def a_record(step: int, *, error: str | None = None, **changes: Any) -> StepRecord:
    """Ten seconds a step: 4 s of generation, 2.5 s of training."""
    began = BEGAN + 10 * step
    weights = WeightsRef(version=step, uri="memory://w", digest=f"{step:064d}")
    known: dict[str, Any] = {
        "run": RUN,
        "step": step,
        "outcome": StepPhase.FAILED if error else StepPhase.DONE,
        "error": error,
        "result": StepResult(
            step=step,
            weights=weights,
            batch=BatchMetrics(
                samples=256,
                groups=32,
                dropped_groups=1,
                reward_mean=0.25 * step,
                reward_std=0.1,
                exact_share=0.5,
                teacher_kl=-0.01,
                response_tokens=1280,
                truncated=0,
                staleness=step % 3,
            ),
            training=TrainResult(
                step=step,
                rows=256,
                loss=0.5,
                grad_norm=1.0,
                clip_fraction=0.01,
                policy_kl=0.001,
                logprob_gap=0.02,
                tokens=1280,
                seconds=2.0,
                weights=weights,
                metrics={"entropy": 1.5, "logprob_gap_max": 0.7},
            ),
            evaluation=Evaluation(
                step=step,
                weight_version=step,
                problems=512,
                accuracy=0.4,
                sets=(
                    SetEvaluation(name="greedy", problems=512, samples=1, accuracy=0.4),
                    SetEvaluation(
                        name="many", problems=64, samples=8, accuracy=0.3, pass_at={8: 0.9}
                    ),
                ),
            ),
            phases=(
                PhaseTime(phase=StepPhase.GENERATING, started=began, seconds=4.0),
                PhaseTime(phase=StepPhase.TRAINING, started=began + 4, seconds=2.5),
            ),
        ),
        "transitions": transitions(began, step, *HELD),
    }
    return StepRecord.model_validate(known | changes)


def transitions(
    began: float, step: int, *moves: tuple[float, str, str, str]
) -> tuple[dict[str, Any], ...]:
    return tuple(
        LeaseTransition(
            at=began + at, role=role, event=event, state=state, fence=step + 1
        ).model_dump()
        for at, role, event, state in moves
    )


def a_recovery(step: int, **changes: Any) -> RecoveryTrace:
    """Noticed two seconds into the step, mended in twelve."""
    at = BEGAN + 10 * step + 2
    known: dict[str, Any] = {
        "workflow": f"w-{step}",
        "engine_id": "policy/0",
        "role": "rollout",
        "cause": "its process 7 is gone",
        "states": (
            (RecoveryState.FENCED, at),
            (RecoveryState.STOPPING, at),
            (RecoveryState.REBUILDING, at + 3),
            (RecoveryState.READMITTED, at + 12),
        ),
        "ended": at + 12,
    }
    return RecoveryTrace.model_validate(known | changes)


def a_retry(step: int) -> PhaseRetry:
    at = BEGAN + 10 * step
    return PhaseRetry(
        phase=StepPhase.GENERATING,
        what="generate",
        attempt=1,
        began=at + 1,
        failed=at + 2.5,
        recovered=at + 9,
        error="Transient: no answer",
    )


def some_samples(
    step: int, groups: int, size: int, *, text: str = "0147", unscored: int | None = None
) -> pa.Table:
    """``groups`` x ``size`` scored samples; the reward of group g is g, of sample 0 one less."""
    rows = groups * size
    group = [k // size for k in range(rows)]
    sample = [k % size for k in range(rows)]
    rewards = [
        None if g == unscored and s == 0 else float(g - (s == 0))
        for g, s in zip(group, sample, strict=True)
    ]
    lists = pa.ListArray.from_arrays(
        pa.array(range(0, 2 * rows + 1, 2), pa.int32()), pa.array([5, 1] * rows, pa.int32())
    )
    values: dict[str, Any] = {
        "run": pa.array([RUN] * rows),
        "step": pa.array([step] * rows, pa.int64()),
        "group": pa.array(group, pa.int64()),
        "sample": pa.array(sample, pa.int64()),
        "prompt": pa.array([f"{g}>" for g in group]),
        "answer": pa.array(["0123"] * rows),
        "response": pa.array([f"{text}{g}" for g in group]),
        "response_ids": lists,
        "rollout_log_probs": lists.cast(pa.list_(pa.float32())),
        "weight_version": pa.array([step - 1] * rows, pa.int64()),
        "finish_reason": pa.array(["stop"] * rows),
        "reward": pa.array(rewards, pa.float64()),
        "reward_source": pa.array(["genrm:judge"] * rows),
        "reward_detail": pa.array(["y" if r else "n" for r in rewards]),
        "teacher_log_probs": lists.cast(pa.list_(pa.float32())),
    }
    columns = [values.get(f.name, pa.nulls(rows, f.type)) for f in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def keep(store: str, *records: StepRecord) -> StagingStore:
    """Write the records of the run."""
    files = StagingStore(RunRef(run=RUN, store=store))
    for record in records:
        document = record.model_dump(mode="json")
        files.write_json(f"steps/{record.step}/record.json", document)
    return files
