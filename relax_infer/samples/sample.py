"""One sample, one group, and the Arrow schema they are staged in."""

from collections.abc import Sequence
from typing import Any, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("attempt", pa.int64()),
        ("rid", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("response", pa.string()),
        ("response_ids", pa.list_(pa.int32())),
        ("rollout_log_probs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("weight_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("reward_source", pa.string()),
        ("reward_detail", pa.string()),
        ("teacher_log_probs", pa.list_(pa.float32())),
        ("metadata", pa.string()),
    ]
)
"""A score that is not there is null, never a number."""

_TOP_IDS, _TOP_LOG_PROBS = pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.float32()))

TOP_K_SCHEMA = pa.schema(
    [
        ("student_topk_token_ids", _TOP_IDS),
        ("student_topk_log_probs", _TOP_LOG_PROBS),
        ("opd_topk_token_ids", _TOP_IDS),
        ("opd_topk_teacher_log_probs", _TOP_LOG_PROBS),
        ("opd_topk_student_log_probs", _TOP_LOG_PROBS),
        ("opd_topk_ksz", pa.list_(pa.int32())),
    ]
)
"""Columns of distillation over several tokens a position; only files of such runs have them."""

IDENTITY = ("run", "step", "group", "sample")
"""What tells two samples apart; it travels with every channel."""


class Sample(BaseModel):
    """One response of the policy to one prompt, with every channel that it has so far."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run: str
    step: int
    group: int
    """Ordinal of its prompt in the step."""
    sample: int
    """Ordinal in its group."""
    attempt: int
    """Attempt of the generation phase that got it."""
    rid: str
    """Request id at the engine."""
    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    """The right answer, where the task knows it."""
    response: str
    response_ids: tuple[int, ...]
    """R token ids, the end token included if it was sampled."""
    rollout_log_probs: tuple[float, ...]
    """R natural log-probs, as the engine sampled them."""
    loss_mask: tuple[int, ...]
    """R ones and zeros: whether the policy itself produced the token."""
    weight_version: int
    finish_reason: str
    """``stop``: it ended by itself; ``length``: it hit the token limit."""
    reward: float | None = None
    reward_source: str | None = None
    reward_detail: str | None = None
    """Why there is no reward, or the judge's words."""
    teacher_log_probs: tuple[float, ...] | None = None
    """R natural log-probs of the sampled tokens under the Teacher."""
    metadata: str = "{}"
    """JSON: what the task needs to grade the response."""
    student_topk_token_ids: tuple[tuple[int, ...], ...] | None = None
    """R rows of the policy's K likeliest tokens, as it sampled."""
    student_topk_log_probs: tuple[tuple[float, ...], ...] | None = None
    """R rows of their natural log-probs."""
    opd_topk_token_ids: tuple[tuple[int, ...], ...] | None = None
    """R rows of the tokens to distil over."""
    opd_topk_teacher_log_probs: tuple[tuple[float, ...], ...] | None = None
    """R rows of their natural log-probs under the Teacher."""
    opd_topk_student_log_probs: tuple[tuple[float, ...], ...] | None = None
    """R rows of those of the policy, where they are known of every token."""
    opd_topk_ksz: tuple[int, ...] | None = None
    """R row lengths, where rows differ (the union of both models' tokens)."""

    @model_validator(mode="after")
    def _channels_are_aligned(self) -> Self:
        tokens = len(self.response_ids)
        for name in ("rollout_log_probs", "loss_mask", "teacher_log_probs", *TOP_K_SCHEMA.names):
            channel: Sequence[Any] | None = getattr(self, name)
            if channel is not None and len(channel) != tokens:
                raise ValueError(
                    f"{self.name}: {name} has {len(channel)} entries, the response {tokens} tokens"
                )
        return self

    @property
    def name(self) -> str:
        """For people: which sample this is."""
        return f"step {self.step} group {self.group} sample {self.sample}"

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"


class SampleGroup(BaseModel):
    """All samples of one prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: tuple[Sample, ...]

    def to_table(self) -> pa.Table:
        return to_table(self.samples)


def to_table(samples: Sequence[Sample]) -> pa.Table:
    """Samples as rows, in the order given."""
    rows = [s.model_dump() for s in samples]
    more = [f for f in TOP_K_SCHEMA if any(row[f.name] is not None for row in rows)]
    return pa.Table.from_pylist(rows, schema=pa.schema([*SCHEMA, *more]))


def from_table(table: pa.Table) -> list[Sample]:
    """Rows as samples; raises ValueError on a row that is not one."""
    return [Sample.model_validate(row) for row in table.to_pylist()]
