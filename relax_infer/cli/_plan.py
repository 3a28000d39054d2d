"""A picture of every GPU in every phase."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_infer.cli._findings import show_findings
from relax_infer.cli._recipes import Checked
from relax_infer.placement import InferencePlacementPlan
from relax_infer.placement.picture import (
    COLOURS,
    LETTERS,
    Cell,
    legend,
    node_label,
    node_rows,
    phase_title,
)
from relax_infer.placement.preflight import Finding

_LISTED = 4
"""GPUs whose reserved shares are listed one by one; of more, the different sums are."""
_WIDTH = 200
"""Characters of a line where the output is no terminal."""


def show_plan(
    checked: Checked, *, as_json: bool, findings: Sequence[Finding] | None = None
) -> None:
    """Print it, and what was found of the living cluster, if that was looked at."""
    plan = checked.plan
    if as_json:
        document = plan.to_dict()
        if findings is not None:
            can_run = all(finding.result != "missing" for finding in findings)
            listed = [asdict(finding) for finding in findings]
            document["live"] = {"can_run": can_run, "findings": listed}
        typer.echo(json.dumps(document, indent=2))
        return
    how = {
        "defer": "roles take turns",
        "split": "inference roles side by side",
        "decoupled": "a pool for each role",
    }
    alone = all(len(phase.roles) == 1 for phase in plan.phases)
    typer.echo(
        f"{checked.recipe.name}: mode {plan.mode}, {plan.total_required_gpus} GPUs,"
        f" {'one role at a time' if alone else how[plan.mode]}"
    )
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(_picture(plan))
    for role, text in legend(plan):
        console.print(Text.assemble((LETTERS[role], _style(role)), f"  {text}"))
    typer.echo(f"Reserved with Ray, GPU by GPU: {_reserved(plan)}")
    if findings is not None:
        show_findings(findings, as_json=False)


def _picture(plan: InferencePlacementPlan) -> Table:
    """A letter for each GPU; a space before each engine's first."""
    table = Table(header_style="bold")
    table.add_column("node")
    for phase in plan.phases:
        table.add_column(phase_title(phase), no_wrap=True)
    for row in node_rows(plan):
        table.add_row(node_label(plan, row), *(_node(cells) for cells in row.phases))
    return table


def _node(cells: Sequence[Cell | None]) -> Text:
    text = Text()
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
