"""Samples of a step for people: found where they are by now, filtered and made small."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pyarrow as pa

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import layout
from relax_infer.samples.store import StagingStore

pc: Any = import_module("pyarrow.compute")
"""Its functions are made when it is imported, so type checkers do not know them."""

_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")
_COMPARE = {
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
}


@dataclass(frozen=True)
class Condition:
    """``field op value``: of a number, a text or ``null``; ``~`` is *contains*."""

    field: str
    op: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Raises PermanentError when it is of another form."""
        found = _CONDITION.fullmatch(text)
        if found is None or not found[3]:
            raise PermanentError(
                f"--where {text!r} is no condition.",
                cure="Write for instance --where 'reward<0.5', --where 'response~012' or"
                " --where reward=null.",
            )
        return cls(found[1], found[2], found[3])

    def mask(self, table: pa.Table) -> Any:
        """Which rows satisfy it; what has no value satisfies only ``=null``."""
        known = [f.name for f in table.schema if not pa.types.is_list(f.type)]
        if self.field not in known:
            raise PermanentError(
                f"--where {self.field}{self.op}{self.value}: samples have no field {self.field}"
                " that can be compared.",
                cure=f"They have {', '.join(known)}.",
            )
        column = table.column(self.field)
        if self.value == "null" and self.op in ("=", "==", "!="):
            return pc.is_valid(column) if self.op == "!=" else pc.is_null(column)
        if self.op == "~":
            return pc.match_substring(pc.cast(column, pa.string()), self.value)
        value: Any = self.value
        if not pa.types.is_string(column.type):
            try:
                value = float(self.value)
            except ValueError:
                raise PermanentError(
                    f"--where {self.field}{self.op}{self.value}: {self.field} is a number,"
                    f" {self.value!r} is none."
                ) from None
            column = pc.cast(column, pa.float64())
        return _COMPARE[self.op](column, value)


@dataclass(frozen=True)
class Found:
    """What a look found."""

    stage: str
    """``scored``; before that ``generated``, or ``being generated`` while groups are missing."""
    total: int
    rows: pa.Table


def look(
    store: StagingStore, step: int, conditions: Sequence[Condition] = (), group: int | None = None
) -> Found:
    """The samples of a step that satisfy every condition, with their length as ``tokens``.

    Raises:
        PermanentError: the run or the step keeps no samples, or a condition has no such field.
    """
    stage, table = _newest(store, step)
    tokens = pc.list_value_length(table.column("response_ids"))
    table = table.append_column("tokens", pc.cast(tokens, pa.int64()))
    total = table.num_rows
    if group is not None:
        known = pc.unique(table.column("group")).to_pylist()
        if group not in known:
            raise PermanentError(
                f"Step {step} of run {store.run} has no group {group} among its {stage} samples.",
                cure=f"It has {_span(sorted(known))}.",
            )
        table = table.filter(pc.equal(table.column("group"), group))
    for condition in conditions:
        table = table.filter(condition.mask(table))
    return Found(stage, total, table)


def _newest(store: StagingStore, step: int) -> tuple[str, pa.Table]:
    for stage, name in (
        ("scored", layout.scored(step)),
        ("generated", layout.phase_file(step, layout.GENERATED)),
    ):
        if store.exists(name):
            return stage, store.peek(name)
    shards = store.shards(step, layout.GENERATED)
    if shards:
        return "being generated", pa.concat_tables([store.peek(name) for name in shards.values()])
    steps = store.steps()
    if not steps:
        raise PermanentError(
            f"Run {store.run} keeps no samples.",
            cure="The first come while its first step generates; `relax-infer status` lists the"
            " runs and where each stands.",
        )
    raise PermanentError(
        f"Step {step} of run {store.run} keeps no samples.",
        cure=f"The store has {_span(steps)}; step 0 only evaluates.",
    )


def _span(numbers: list[int]) -> str:
    gapless = numbers == list(range(numbers[0], numbers[-1] + 1))
    if gapless and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
