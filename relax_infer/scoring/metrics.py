"""What a scored batch looks like: numbers for people, and the samples themselves."""

import json
import statistics

import pyarrow as pa

from relax_infer.contracts.refs import StagedRef
from relax_infer.contracts.run import BatchMetrics
from relax_infer.samples import layout
from relax_infer.samples.sample import Sample, from_table
from relax_infer.samples.store import StagingStore
from relax_infer.samples.tasks import Task


def batch_metrics(
    table: pa.Table,
    task: Task,
    *,
    dropped_groups: int = 0,
    drop_reasons: dict[str, int] | None = None,
) -> BatchMetrics:
    """Of the scored rows. ``teacher_kl`` is the mean over response tokens of rollout minus teacher
    log-prob: a one-sample estimate of the reverse KL from the policy to the Teacher."""
    samples = from_table(table)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    exact = [task.check(s.answer, s.response_ids, s.metadata) for s in samples]
    return BatchMetrics(
        samples=len(samples),
        groups=len({sample.group for sample in samples}),
        dropped_groups=dropped_groups,
        drop_reasons=drop_reasons or {},
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
        exact_share=statistics.fmean(exact),
        teacher_kl=_teacher_kl(samples),
        response_tokens=sum(len(sample.response_ids) for sample in samples),
        truncated=sum(not sample.finished for sample in samples),
        staleness=max((s.step - 1 - s.weight_version for s in samples), default=0),
    )


def _teacher_kl(samples: list[Sample]) -> float | None:
    gaps = [
        rollout - teacher
        for sample in samples
        if sample.teacher_log_probs is not None
        for rollout, teacher in zip(sample.rollout_log_probs, sample.teacher_log_probs, strict=True)
    ]
    return statistics.fmean(gaps) if gaps else None


def export_samples(store: StagingStore, step: int, table: pa.Table) -> StagedRef:
    """The scored samples as JSON Lines, for people and their tools."""
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    name = layout.export(step)
    digest = store.write_bytes(name, lines.encode())
    return StagedRef(uri=store.url(name), sha256=digest, rows=table.num_rows)
