"""A picture of every GPU in every phase."""

import json
from collections.abc import Iterable

import typer
from rich.console import Console
from rich.table import Table

from relax_infer.cli._recipes import Checked
from relax_infer.placement import InferencePlacementPlan, Phase, Placement, Slot

_PHASES = {
    "inference": "generate, evaluate",
    "genrm_score": "judge",
    "teacher_score": "teach",
    "critic_train": "train the critic",
}
_WIDEST = 4
"""GPUs of a picture with a column for each; a larger plan is a list."""


def show_plan(checked: Checked, *, as_json: bool) -> None:
    """Print it."""
    plan = checked.plan
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
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
    small = len(plan.pool_sizes) == 1 and plan.total_required_gpus <= _WIDEST
    Console().print(_picture(plan) if small else _list(plan))
    typer.echo(f"Reserved with Ray, GPU by GPU: {_reserved(plan)}")


def _picture(plan: InferencePlacementPlan) -> Table:
    gpus = range(plan.total_required_gpus)
    table = Table(header_style="bold")
    table.add_column("phase")
    for gpu in gpus:
        table.add_column(f"GPU {gpu}")
    for phase in plan.phases:
        table.add_row(_title(phase), *(_cell(plan, phase, gpu) for gpu in gpus))
    return table


def _list(plan: InferencePlacementPlan) -> Table:
    table = Table(header_style="bold")
    for title in ("phase", "pool", "GPUs", "role", "engines or ranks"):
        table.add_column(title)
    for phase in plan.phases:
        title = _title(phase)
        for slot in phase.slots:
            span = f"{slot.bundle_start}-{slot.bundle_stop - 1}"
            name = slot.role if slot.model_id is None else f"{slot.role} {slot.model_id}"
            table.add_row(title, slot.pool, span, name, _count(plan, slot))
            title = ""
    return table


def _title(phase: Phase) -> str:
    return _PHASES.get(phase.name, phase.name)


def _placement(plan: InferencePlacementPlan, slot: Slot) -> Placement | None:
    key = (slot.role, slot.model_id, slot.group_id)
    return next((p for p in plan.placements if (p.role, p.model_id, p.group_id) == key), None)


def _count(plan: InferencePlacementPlan, slot: Slot) -> str:
    placement = _placement(plan, slot)
    if placement is None:
        return f"{slot.bundle_stop - slot.bundle_start} ranks"
    kind = "" if placement.worker_type == "regular" else f"{placement.worker_type} "
    nodes = placement.nodes_per_engine
    over = f" over {nodes} nodes" if nodes > 1 else ""
    return f"{placement.replicas} {kind}x {placement.gpus_per_engine} GPUs{over}"


def _cell(plan: InferencePlacementPlan, phase: Phase, gpu: int) -> str:
    for slot in phase.slots:
        if slot.bundle_start <= gpu < slot.bundle_stop:
            offset = gpu - slot.bundle_start
            placement = _placement(plan, slot)
            if placement is None:
                return f"{slot.role} rank {offset}"
            return f"{slot.role} {slot.model_id} #{offset // placement.gpus_per_engine}"
    return "-"


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
    if len(listed) <= _WIDEST:
        return ", ".join(listed)
    counts = {share: listed.count(share) for share in dict.fromkeys(listed)}
    return ", ".join(f"{share} on {count}" for share, count in counts.items())
