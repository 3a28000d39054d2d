"""What is published of a sample, and the digest that publisher and trainer both compute.

Pure: numpy and pyarrow. The columns:

====================  ==================  ==========================================================
``group``             int64               prompt of the step
``sample``            int64               sample of the group
``weight_version``    int64               weights that generated it
``prompt_ids``        int64, ragged       token ids of the prompt
``response_ids``      int64, ragged       token ids of the response, its end included
``rollout_log_probs`` float32, ragged     the engine's log-prob of each response token
``loss_mask``         int8, ragged        1: the token is trained on
``reward``            float64             absent where nothing is rewarded
``teacher_log_probs`` float32, ragged     the Teacher's log-probs; absent without a Teacher
====================  ==================  ==========================================================

With distillation over several tokens a position, rows of one token one after another and not
padded: ``opd_topk_token_ids`` int64, ``opd_topk_teacher_log_probs`` and, where it is known of every
token, ``opd_topk_student_log_probs`` float32. Rows have K entries, or as many as ``opd_topk_ksz``
(int64, one for each token) says, where that is a column.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from relax_infer.contracts.failures import PermanentError

SCALARS = {"group": "int64", "sample": "int64", "weight_version": "int64", "reward": "float64"}
RAGGED = {
    "prompt_ids": "int64",
    "response_ids": "int64",
    "rollout_log_probs": "float32",
    "loss_mask": "int8",
    "teacher_log_probs": "float32",
    "opd_topk_token_ids": "int64",
    "opd_topk_teacher_log_probs": "float32",
    "opd_topk_student_log_probs": "float32",
    "opd_topk_ksz": "int64",
}
_NESTED = tuple(name for name in RAGGED if name.startswith("opd_topk_") and name[-3:] != "ksz")
OPTIONAL = frozenset({"reward", "teacher_log_probs", "opd_topk_ksz", *_NESTED})
_PER_TOKEN = ("rollout_log_probs", "loss_mask", "teacher_log_probs", "opd_topk_ksz")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, one after another: ``values`` [sum(lengths)], ``lengths`` [n]."""

    values: Array
    lengths: Array

    def rows(self) -> list[Array]:
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclass(frozen=True)
class PublishedRows:
    """The rows of one partition, sorted by (group, sample)."""

    columns: Mapping[str, Array | Ragged]

    def scalar(self, name: str) -> Array:
        column = self.columns[name]
        assert not isinstance(column, Ragged)
        return column

    def ragged(self, name: str) -> Ragged:
        column = self.columns[name]
        assert isinstance(column, Ragged)
        return column

    @property
    def keys(self) -> list[str]:
        """``<group>/<sample>`` of each row."""
        pairs = zip(self.scalar("group").tolist(), self.scalar("sample").tolist(), strict=True)
        return [f"{group}/{sample}" for group, sample in pairs]

    def __len__(self) -> int:
        return len(self.scalar("group"))


def rows_digest(rows: PublishedRows) -> str:
    """SHA-256 over the keys in order and every column: name, dtype, lengths, little-endian bytes.

    The same rows have the same digest whichever process read them and in whichever order its
    columns come.
    """
    hasher = hashlib.sha256(json.dumps(rows.keys).encode())
    for name in sorted(rows.columns):
        column = rows.columns[name]
        values, lengths = (
            (column.values, column.lengths) if isinstance(column, Ragged) else (column, None)
        )
        hasher.update(f"\n{name} {values.dtype.name}\n".encode())
        if lengths is not None:
            hasher.update(np.ascontiguousarray(lengths, dtype="<i8").tobytes())
        little_endian = values.dtype.newbyteorder("<")
        hasher.update(np.ascontiguousarray(values, dtype=little_endian).tobytes())
    return hasher.hexdigest()


def rows_of_table(table: pa.Table) -> PublishedRows:
    """The published columns of a scored table, sorted by (group, sample).

    A column of ``OPTIONAL`` that is missing or null in every row is left out.

    Raises:
        PermanentError: naming column and sample: a column is missing, null in some rows, not
            finite, or not as long as the response; a key comes twice; there are no rows.
    """
    missing = [c for c in (*SCALARS, *RAGGED) if c not in table.column_names and c not in OPTIONAL]
    if missing:
        raise PermanentError(f"The scored table has no column {', '.join(missing)}.")
    if table.num_rows == 0:
        raise PermanentError("The scored table has no rows: there is nothing to train on.")
    table = table.sort_by([("group", "ascending"), ("sample", "ascending")])
    columns: dict[str, Array | Ragged] = {}
    for name in sorted((*SCALARS, *RAGGED)):
        if name not in table.column_names:
            continue
        column = table.column(name).combine_chunks()
        if name in OPTIONAL and column.null_count == table.num_rows:
            continue
        if column.null_count:
            where = column.is_null().to_pylist().index(True)
            raise _wrong(table, where, name, "has no value; write-back lets none through")
        columns[name] = _scalar(column, name) if name in SCALARS else _ragged(column, name)
    rows = PublishedRows(columns)
    _check(table, rows)
    return rows


def _scalar(column: Any, name: str) -> Array:
    return cast("Array", column.cast(SCALARS[name]).to_numpy(zero_copy_only=False))


def _ragged(column: Any, name: str) -> Ragged:
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if name in _NESTED:
        owner = np.repeat(np.arange(len(lengths)), lengths)
        widths = values.value_lengths().to_numpy(zero_copy_only=False)
        lengths = np.bincount(owner, weights=widths, minlength=len(lengths)).astype(np.int64)
        values = values.flatten()
    if values.null_count:
        raise PermanentError(f"Column {name} of the scored table holds nulls inside its lists.")
    return Ragged(values.cast(RAGGED[name]).to_numpy(zero_copy_only=False), lengths)


def _check(table: pa.Table, rows: PublishedRows) -> None:
    keys = rows.keys
    for where in range(1, len(keys)):
        if keys[where] == keys[where - 1]:
            raise _wrong(table, where, "group/sample", "comes twice")
    if (empty := np.nonzero(rows.ragged("prompt_ids").lengths == 0)[0]).size:
        raise _wrong(table, int(empty[0]), "prompt_ids", "is empty")
    response = rows.ragged("response_ids").lengths
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            if name in _PER_TOKEN and (off := np.nonzero(column.lengths != response)[0]).size:
                where = int(off[0])
                told = f"has {column.lengths[where]} entries for {response[where]} response tokens"
                raise _wrong(table, where, name, told)
            owner = np.repeat(np.arange(len(rows)), column.lengths)
            values = column.values
        else:
            owner, values = np.arange(len(rows)), column
        if values.dtype.kind == "f" and (bad := np.nonzero(~np.isfinite(values))[0]).size:
            raise _wrong(table, int(owner[bad[0]]), name, f"is {values[bad[0]]}")


def _wrong(table: pa.Table, where: int, column: str, why: str) -> PermanentError:
    group, sample = table.column("group")[where].as_py(), table.column("sample")[where].as_py()
    return PermanentError(
        f"Sample {group}/{sample} cannot be published: its {column} {why}.",
        cure="Look at the step's scored.arrow.",
    )
