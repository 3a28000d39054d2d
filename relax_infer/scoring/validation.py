"""Every required channel is there, finite and aligned with the response; each fault has a name."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples.sample import SCHEMA, TOP_K_SCHEMA, Sample

NAMED = 5
"""Faulty samples that an error names before it only counts."""
ROUNDING = 1e-3
"""By how much an engine's log-prob may be above 0."""

Mode = Literal["student_sampled", "student_topk", "teacher_topk", "union"]
Array = np.ndarray[Any, np.dtype[Any]]
Fault = tuple[int, str]
"""Row, and what is wrong with it."""


def validate_scores(
    samples: Iterable[Sample],
    *,
    needs_reward: bool,
    needs_teacher: bool,
    mode: Mode = "student_sampled",
    top_k: int = 0,
    vocab_size: int | None = None,
) -> None:
    """As :func:`validate_table`, of samples."""
    fields = [*SCHEMA, *TOP_K_SCHEMA]
    rows = list(samples)
    table = pa.table(
        {f.name: pa.array([getattr(s, f.name, None) for s in rows], f.type) for f in fields}
    )
    validate_table(
        table,
        needs_reward=needs_reward,
        needs_teacher=needs_teacher,
        mode=mode,
        top_k=top_k,
        vocab_size=vocab_size,
    )


def validate_table(
    table: pa.Table,
    *,
    needs_reward: bool,
    needs_teacher: bool,
    mode: Mode = "student_sampled",
    top_k: int = 0,
    vocab_size: int | None = None,
) -> None:
    """Check a scored table; ``mode`` and ``top_k`` say which of the Teacher's channels it needs.

    Raises:
        PermanentError: names the first faulty samples and their fields, and counts the rest.
    """
    faults: list[Fault] = []
    if needs_reward:
        faults += _reward_faults(table)
    faults += _per_token(table, "rollout_log_probs")
    faults += _loss_mask_faults(table)
    if needs_teacher:
        faults += _per_token(table, "teacher_log_probs")
        if mode != "student_sampled":
            faults += _top_k_faults(table, mode, top_k, vocab_size)
    if faults:
        faults.sort(key=lambda fault: fault[0])
        more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        told = [f"{sample_name(table, row)}: {what}" for row, what in faults[:NAMED]]
        raise PermanentError("; ".join(told) + more)


def sample_name(table: pa.Table, row: int) -> str:
    """For people: which sample a row is."""
    step, group, sample = (table.column(c)[row].as_py() for c in ("step", "group", "sample"))
    return f"step {step} group {group} sample {sample}"


def whole(column: Any) -> Any:
    """The column as one array; only a column in several pieces is copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def list_lengths(column: Any) -> Array:
    """Length of each list of a column without nulls."""
    return np.asarray(whole(column).value_lengths().to_numpy(zero_copy_only=False))


def _reward_faults(table: pa.Table) -> Iterator[Fault]:
    column = table.column("reward")
    missing = column.is_null().to_numpy()
    values = column.fill_null(0.0).to_numpy()  # only to look at the others
    for row in np.nonzero(missing | ~np.isfinite(values))[0].tolist():
        yield row, f"reward is {None if missing[row] else values[row]}"


def _loss_mask_faults(table: pa.Table) -> Iterator[Fault]:
    response = list_lengths(table.column("response_ids"))
    column = table.column("loss_mask")
    missing = column.is_null().to_numpy()
    off = missing | (_lengths_or_zero(column) != response)
    for row in np.nonzero(off)[0].tolist():
        yield row, "loss_mask is not aligned with the response"
    values, ends = _values(column)
    for row in _rows((values != 0) & (values != 1), ends):
        yield row, "loss_mask has another value than 0 and 1"


def _per_token(table: pa.Table, name: str) -> Iterator[Fault]:
    """A log-prob for each token of the response."""
    response = list_lengths(table.column("response_ids"))
    yield from _aligned(table, name, response)
    values, ends = _values(table.column(name))
    yield from _log_prob_faults(name, values, ends)


def _aligned(table: pa.Table, name: str, response: Array) -> Iterator[Fault]:
    if name not in table.column_names:
        yield from ((row, f"{name} is missing") for row in range(table.num_rows))
        return
    column = table.column(name)
    missing = column.is_null().to_numpy()
    lengths = _lengths_or_zero(column)
    for row in np.nonzero(missing)[0].tolist():
        yield row, f"{name} is missing"
    for row in np.nonzero(~missing & (lengths != response))[0].tolist():
        yield row, f"{name} has {lengths[row]} entries for {response[row]} tokens"


def _log_prob_faults(name: str, values: Array, *ends: Array) -> Iterator[Fault]:
    finite = np.isfinite(values)
    for row in _rows(~finite, *ends):
        yield row, f"{name} is not finite"
    for row in _rows(finite & (values > ROUNDING), *ends):
        yield row, f"{name} is above 0: that is no log-prob"


def _top_k_faults(
    table: pa.Table, mode: Mode, top_k: int, vocab_size: int | None
) -> Iterator[Fault]:
    response = list_lengths(table.column("response_ids"))
    names = ["opd_topk_token_ids", "opd_topk_teacher_log_probs"]
    student = "opd_topk_student_log_probs"
    given = student in table.column_names and table.column(student).null_count < table.num_rows
    if mode == "student_topk" or given:
        names.append(student)
    outer = [fault for name in names for fault in _aligned(table, name, response)]
    if mode == "union":
        outer += _aligned(table, "opd_topk_ksz", response)
    if outer:
        yield from outer
        return
    tokens = np.cumsum(response)
    wanted, most = np.full(int(response.sum()), top_k), top_k
    if mode == "union":
        wanted, most = _values(table.column("opd_topk_ksz"))[0].astype(np.int64), 2 * top_k
        for row in _rows((wanted < top_k) | (wanted > most), tokens):
            yield row, f"opd_topk_ksz is not from {top_k} to {most}"
    for name in names:
        inner = whole(table.column(name)).flatten()
        if inner.null_count:
            yield from (
                (row, f"{name} lacks a token's row") for row in _rows(_nulls(inner), tokens)
            )
            continue
        widths = inner.value_lengths().to_numpy(zero_copy_only=False)
        for row in _rows(widths != wanted, tokens):
            yield row, f"{name} has a row that is not as wide as it must be"
        values, entries = inner.flatten(), np.cumsum(widths)
        if values.null_count:
            yield from (
                (row, f"{name} holds a null") for row in _rows(_nulls(values), entries, tokens)
            )
            continue
        array = values.to_numpy(zero_copy_only=False)
        if name == "opd_topk_token_ids":
            yield from _id_faults(name, array, widths, tokens, vocab_size)
        else:
            yield from _log_prob_faults(name, array, entries, tokens)


def _id_faults(
    name: str, ids: Array, widths: Array, tokens: Array, vocab_size: int | None
) -> Iterator[Fault]:
    wrong = ids < 0
    if vocab_size is not None:
        wrong |= ids >= vocab_size
    entries = np.cumsum(widths)
    for row in _rows(wrong, entries, tokens):
        yield row, f"{name} has an id that is no token"
    token = np.repeat(np.arange(len(widths)), widths)
    order = np.lexsort((ids, token))  # within each token's row, so rows keep their places
    twice = np.zeros(len(ids), dtype=bool)
    twice[1:] = (np.diff(ids[order]) == 0) & (np.diff(token) == 0)
    for row in _rows(twice, entries, tokens):
        yield row, f"{name} names an id twice for one token"


def _nulls(array: Any) -> Array:
    return np.asarray(array.is_null().to_numpy(zero_copy_only=False))


def _lengths_or_zero(column: Any) -> Array:
    lengths = whole(column).value_lengths().fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False))


def _values(column: Any) -> tuple[Array, Array]:
    """All values of a column of lists, and where each row's end; a null among them is NaN."""
    values = whole(column).flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values), np.cumsum(_lengths_or_zero(column))


def _rows(wrong: Array, *ends: Array) -> list[int]:
    """Rows of the places that are wrong; ``ends`` of each level of lists, innermost first. Looked
    up and not laid out: a step has a hundred million places and few that are wrong."""
    places = np.nonzero(wrong)[0]
    for level in ends:
        places = np.searchsorted(level, places, side="right")
    return np.unique(places).tolist()
