"""What distillation over several tokens a position is made of: ids and log-probs, [N, K] each.

N counts the response tokens of all samples, one after another. Pure numpy and pyarrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from relax_infer.scoring.validation import whole

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TopK:
    """Channels of one batch. Row ``n`` has ``ksz[n]`` entries in each of the flat arrays."""

    ids: Array
    """int32 [sum(ksz)]."""
    teacher: Array
    """float32 [sum(ksz)]: the Teacher's log-prob of each id."""
    student: Array | None
    """float32 [sum(ksz)]: the policy's; None where it is not known of every id."""
    ksz: Array
    """int32 [N]."""


def student_top_k(ids: Array, student: Array, teacher_at_student: Array) -> TopK:
    """The policy's K likeliest tokens, with the log-probs of both."""
    return _rectangle(ids, teacher_at_student, student)


def teacher_top_k(ids: Array, teacher: Array, student_at_teacher: Array | None = None) -> TopK:
    """The Teacher's K likeliest tokens."""
    return _rectangle(ids, teacher, student_at_teacher)


def union(
    student_ids: Array,
    student: Array,
    teacher_at_student: Array,
    teacher_ids: Array,
    teacher: Array,
    student_at_teacher: Array | None = None,
) -> TopK:
    """The policy's tokens, then those of the Teacher's that are not among them: K to 2K a row."""
    known = (teacher_ids[:, :, None] == student_ids[:, None, :]).any(axis=2)
    keep = np.concatenate([np.ones_like(student_ids, dtype=bool), ~known], axis=1)
    ids = np.concatenate([student_ids, teacher_ids], axis=1)
    of_teacher = np.concatenate([teacher_at_student, teacher], axis=1)
    of_student = None
    if student_at_teacher is not None:
        of_student = np.concatenate([student, student_at_teacher], axis=1)[keep]
    return TopK(
        ids=ids[keep].astype(np.int32),
        teacher=of_teacher[keep].astype(np.float32),
        student=None if of_student is None else of_student.astype(np.float32),
        ksz=keep.sum(axis=1).astype(np.int32),
    )


def _rectangle(ids: Array, teacher: Array, student: Array | None) -> TopK:
    return TopK(
        ids=ids.reshape(-1).astype(np.int32),
        teacher=teacher.reshape(-1).astype(np.float32),
        student=None if student is None else student.reshape(-1).astype(np.float32),
        ksz=np.full(len(ids), ids.shape[1], dtype=np.int32),
    )


def padded(flat: Array, ksz: Array, width: int, filler: float) -> Array:
    """Rows of ``ksz`` entries as [N, width], for consumers that want a rectangle: the reference
    pads ids with -1."""
    out = np.full((len(ksz), width), filler, dtype=flat.dtype)
    out[np.arange(width) < ksz[:, None]] = flat
    return out


def nested(flat: Array, ksz: Array, response: Sequence[int] | Array, kind: pa.DataType) -> pa.Array:
    """Flat values as a column: per sample one list per token, of ``ksz`` values each."""
    rows = pa.ListArray.from_arrays(_offsets(ksz), pa.array(flat, kind))
    return pa.ListArray.from_arrays(_offsets(response), rows)


def per_token(values: Array, response: Sequence[int] | Array, kind: pa.DataType) -> pa.Array:
    """One value per token as a column of lists."""
    return pa.ListArray.from_arrays(_offsets(response), pa.array(values, kind))


def _offsets(lengths: Sequence[int] | Array) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def rectangle_of(column: Any, width: int) -> Array:
    """A column of [R, K] lists as one [N, K] array; raises ValueError where a row is not K wide."""
    rows = whole(column).flatten()
    widths = rows.value_lengths().to_numpy(zero_copy_only=False)
    if rows.null_count or (widths != width).any():
        raise ValueError(f"a row has not {width} entries")
    values = rows.flatten()
    if values.null_count:
        raise ValueError("a row holds a null")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(-1, width)
