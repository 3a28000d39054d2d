"""A picture of every GPU in every phase."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_infer.cli._findings import show_findings
from relax_infer.cli._recipes import Checked
from relax_infer.config.placed import Scalar
from relax_infer.contracts.counted import counted
from relax_infer.placement import InferencePlacementPlan, Violation
from relax_infer.placement.findings import Finding
from relax_infer.placement.picture import (
    COLOURS,
    LETTERS,
    Cell,
    NodeRow,
    legend,
    node_label,
    node_rows,
    phase_title,
)

_LISTED = 4
"""GPUs whose reserved shares are listed one by one; of more, the different sums are."""
_ROWS = 256
"""Nodes of a plan that are all drawn, and rows of the picture of a larger one."""
_WIDE = 128
"""GPUs of a node that have a letter each; of a wider one roles are counted."""
_DRAWN = 1 << 17
"""GPUs of a plan that is drawn; of a larger one the legend says what there is."""
_ALIKE = 3
"""Nodes, one after another, that are all drawn in a larger plan though they look alike."""
_WIDTH = 10_000
"""Characters of a line where the output is no terminal, and nothing is cut or folded."""


def show_plan(
    checked: Checked, *, as_json: bool, findings: Sequence[Finding] | None = None
) -> None:
    """Print it, and what was found of the living cluster, if that was looked at."""
    plan = checked.plan
    if as_json:
        document = plan.to_dict()
        if findings is not None:
            can_run = all(finding.result != "missing" for finding in findings)
            document["live"] = _live(findings, can_run=can_run)
            document["violations"] = _listed(_violations(findings))
        typer.echo(json.dumps(document, indent=2))
        return
    how = {
        "defer": "roles take turns",
        "split": "inference roles side by side",
        "decoupled": "a pool for each role",
    }
    alone = all(len(phase.roles) == 1 for phase in plan.phases)
    typer.echo(
        f"{checked.recipe.name}: mode {plan.mode}, {counted(plan.total_required_gpus, 'GPU')},"
        f" {'one role at a time' if alone else how[plan.mode]}"
    )
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    if plan.total_required_gpus <= _DRAWN:
        console.print(_picture(plan))
    for role, text in legend(plan):
        console.print(Text.assemble((LETTERS[role], _style(role)), f"  {text}"))
    typer.echo(f"Reserved with Ray, GPU by GPU: {_reserved(plan)}")
    if findings is not None:
        show_findings(findings, as_json=False)


def show_refusal(
    violations: Sequence[Violation],
    *,
    as_json: bool,
    findings: Sequence[Finding] | None = None,
    cured_by: Mapping[str, Scalar] | None = None,
) -> None:
    """What stdout has of a recipe without a plan; the reasons as sentences are the error's."""
    if as_json:
        every = [*violations, *_violations(findings or ())]
        document: dict[str, Any] = {"violations": _listed(every)}
        if cured_by:
            document["cured_by"] = dict(cured_by)
        if findings is not None:
            document["live"] = _live(findings, can_run=False)
        typer.echo(json.dumps(document, indent=2))
    elif findings is not None:
        show_findings(findings, as_json=False)


def _violations(findings: Iterable[Finding]) -> list[Violation]:
    """Whatever is missing, by the recipe's field or by where it was looked for."""
    return [each.violation for each in findings if each.violation is not None]


def _listed(violations: Iterable[Violation]) -> list[dict[str, str]]:
    return [{"field": v.field, "rule": v.rule, "cure": v.cure} for v in violations]


def _live(findings: Sequence[Finding], *, can_run: bool) -> dict[str, Any]:
    return {"can_run": can_run, "findings": [asdict(finding) for finding in findings]}


def _picture(plan: InferencePlacementPlan) -> Table:
    """A letter for each GPU; a space before each engine's first."""
    table = Table(header_style="bold")
    table.add_column("node", no_wrap=True)
    for phase in plan.phases:
        table.add_column(phase_title(phase), overflow="fold")
    for shown in _shown(node_rows(plan)):
        if isinstance(shown, str):
            table.add_row(shown)
        else:
            table.add_row(node_label(plan, shown), *(_node(cells) for cells in shown.phases))
    return table


def _shown(rows: Sequence[NodeRow]) -> Iterator[NodeRow | str]:
    """Every node; of a large plan the first and the last of those that look alike."""
    if len(rows) <= _ROWS:
        yield from rows
        return
    told = list(_without_alike(rows))
    half = _ROWS // 2
    yield from told if len(told) <= _ROWS else told[:half]
    if len(told) > _ROWS:
        yield f"… and {len(told) - 2 * half} rows more"
        yield from told[-half:]


def _without_alike(rows: Sequence[NodeRow]) -> Iterator[NodeRow | str]:
    for _, group in groupby(rows, _look):
        alike = list(group)
        if len(alike) <= _ALIKE:
            yield from alike
        else:
            yield alike[0]
            yield f"… and {len(alike) - 2} nodes like these"
            yield alike[-1]


def _look(row: NodeRow) -> tuple[object, ...]:
    """What two nodes have in common that are drawn alike."""
    return row.pool, *(tuple(c and (c.role, c.begins) for c in cells) for cells in row.phases)


def _node(cells: Sequence[Cell | None]) -> Text:
    text = Text()
    if len(cells) > _WIDE:
        for role, run in groupby(None if cell is None else cell.role for cell in cells):
            letter, style = ("·", "") if role is None else (LETTERS[role], _style(role))
            text.append(" " if text else "").append(letter, style).append(f" x{len(list(run))}")
        return text
    before = None
    for k, cell in enumerate(cells):
        if (k and (cell is None) != (before is None)) or (cell is not None and k and cell.begins):
            text.append(" ")
        text.append("·" if cell is None else LETTERS[cell.role], _style(cell.role) if cell else "")
        before = cell
    return text


def _style(role: str) -> str:
    return f"bold white on {COLOURS[role]}"


def _reserved(plan: InferencePlacementPlan) -> str:
    """Pool by pool."""
    pools: list[str] = []
    for pool, size in plan.pool_sizes:
        shares = [0.0] * size
        for placement in plan.placements:
            for gpu in placement.heads if placement.pool == pool else ():
                shares[gpu] += placement.ray_gpu_fraction
        for training in plan.training:
            held = range(training.bundle_start, training.bundle_stop)
            for gpu in held if training.pool == pool else ():
                shares[gpu] += training.ray_gpu_fraction
        told = _told(f"{share:g}" for share in shares)
        pools.append(told if len(plan.pool_sizes) == 1 else f"{pool}: {told}")
    return "; ".join(pools)


def _told(shares: Iterable[str]) -> str:
    """Each sum; of a large pool the different sums and on how many GPUs they are."""
    listed = list(shares)
    if len(listed) <= _LISTED:
        return ", ".join(listed)
    counts = {share: listed.count(share) for share in dict.fromkeys(listed)}
    return ", ".join(f"{share} on {count}" for share, count in counts.items())
