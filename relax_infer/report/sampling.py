"""Which samples a report shows: few enough for one file, by a rule that the page states."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pyarrow as pa

from relax_infer.contracts.refs import RunRef
from relax_infer.samples import StagingStore, layout

pc: Any = import_module("pyarrow.compute")

STEPS = 40
"""Steps whose samples are shown."""
PER_STEP = 24
"""Samples of each; whole groups."""
CHARACTERS = 1_500_000
"""Of all texts together."""
_TEXTS = ("prompt", "answer", "response", "reward_detail")
_LEAST = 300
"""Characters that a text may have at least."""


@dataclass(frozen=True)
class Chosen:
    """Samples for the page."""

    rows: list[dict[str, Any]]
    total: int
    """Scored samples of the steps that were looked at."""
    steps: int
    of_steps: int
    clipped: int | None
    """Characters after which texts are cut; None: none is."""

    @property
    def rule(self) -> str:
        """How these came to be the ones, for the page."""
        words = f"{len(self.rows)} of {self.total} samples"
        if self.steps < self.of_steps:
            words += f" of {self.steps} of {self.of_steps} steps, spread evenly"
        if len(self.rows) < self.total:
            words += (
                f"; of a step whole groups, until there are {PER_STEP} samples: those of the lowest"
                " and the highest mean reward, those with an unscored sample, then by a fixed draw"
            )
        if self.clipped is not None:
            words += f"; texts are cut in the middle after {self.clipped} characters"
        return f"{words}."


def choose(run: RunRef, steps: Sequence[int]) -> Chosen:
    """Of the scored samples of these steps. A step without any, or whose file cannot be read, is
    passed over: the report says what there is."""
    store = StagingStore(run)
    there = [step for step in steps if store.exists(layout.scored(step))]
    looked = spread(there, STEPS)
    rows: list[dict[str, Any]] = []
    total = 0
    for step in looked:
        table = store.browse(layout.scored(step))
        total += table.num_rows
        rows += [_row(row) for row in _picked(table, run.run, step)]
    clip = _clip(rows)
    longest = max((len(row[name] or "") for row in rows for name in _TEXTS), default=0)
    if longest <= clip:
        return Chosen(rows, total, len(looked), len(there), None)
    for row in rows:
        row.update({name: cut(row[name], clip) for name in _TEXTS})
    return Chosen(rows, total, len(looked), len(there), clip)


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of them, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    return [values[round(k * last / (most - 1))] for k in range(most)]


def cut(text: str | None, limit: int) -> str | None:
    """Its beginning and end, where it is longer than ``limit`` characters."""
    if text is None or len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail]} […{len(text) - limit} characters…] {text[-tail:]}"


def _clip(rows: Sequence[dict[str, Any]]) -> int:
    texts = max(len(rows) * len(_TEXTS), 1)
    return max(CHARACTERS // texts, _LEAST)


def _picked(table: pa.Table, run: str, step: int) -> list[dict[str, Any]]:
    """Whole groups, by group and sample; the least that a group takes part with is one sample."""
    by_group = table.select(["group", "reward"]).group_by("group")
    told = by_group.aggregate([("reward", "mean"), ("reward", "count"), ("group", "count")])
    groups = told.to_pylist()
    if not groups:
        return []
    order = _order(groups, f"{run}/{step}")
    kept: list[int] = []
    count = 0
    for group in order:
        if kept and count + group["group_count"] > PER_STEP:
            continue
        kept.append(group["group"])
        count += group["group_count"]
    mask = pc.is_in(table.column("group"), value_set=pa.array(kept, pa.int64()))
    found = table.filter(mask).sort_by([("group", "ascending"), ("sample", "ascending")])
    return found.slice(0, PER_STEP).to_pylist()


def _order(groups: Sequence[dict[str, Any]], seed: str) -> list[dict[str, Any]]:
    """Lowest mean, highest mean, with unscored samples, then the rest as a hash throws them."""

    def thrown(group: dict[str, Any]) -> str:
        return hashlib.sha256(f"{seed}/{group['group']}".encode()).hexdigest()

    rest = sorted(groups, key=thrown)
    scored = [g for g in rest if g["reward_mean"] is not None]
    first: list[dict[str, Any]] = []
    if scored:
        first = [
            min(scored, key=lambda g: g["reward_mean"]),
            max(scored, key=lambda g: g["reward_mean"]),
        ]
    first += [g for g in rest if g["reward_count"] < g["group_count"]][:1]
    unique = {g["group"]: g for g in (*first, *rest)}
    return list(unique.values())


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a sample."""
    rollout, teacher = row["rollout_log_probs"] or [], row.get("teacher_log_probs")
    return {
        "step": row["step"],
        "group": row["group"],
        "sample": row["sample"],
        "prompt": row["prompt"],
        "answer": row["answer"],
        "response": row["response"],
        "reward": row["reward"],
        "reward_source": row["reward_source"],
        "reward_detail": row["reward_detail"],
        "finish": row["finish_reason"],
        "weights": row["weight_version"],
        "tokens": len(row["response_ids"] or []),
        "log_prob": _mean(iter(rollout)),
        "teacher_kl": None
        if teacher is None
        else _mean(r - t for r, t in zip(rollout, teacher, strict=True)),
    }


def _mean(values: Iterator[float]) -> float | None:
    known = list(values)
    mean = sum(known) / len(known) if known else math.nan
    return float(f"{mean:.4g}") if math.isfinite(mean) else None
