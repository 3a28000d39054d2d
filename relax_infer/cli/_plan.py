"""A picture of every GPU in every phase."""

import json

import typer
from rich.console import Console
from rich.table import Table

from relax_infer.cli._recipes import Checked
from relax_infer.placement import InferencePlacementPlan, Placement

_PHASES = {"rollout": "generate, evaluate", "genrm": "judge", "teacher": "teach"}


def show_plan(checked: Checked, *, as_json: bool) -> None:
    """Print it."""
    plan = checked.plan
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    typer.echo(
        f"{checked.recipe.name}: mode {plan.mode}, {plan.total_required_gpus} GPUs,"
        " one role at a time"
    )
    Console().print(_picture(plan, ranks=checked.recipe.train.ranks))
    typer.echo(f"Reserved with Ray, GPU by GPU: {_reserved(checked)}")


def _picture(plan: InferencePlacementPlan, ranks: int) -> Table:
    gpus = range(plan.total_required_gpus)
    table = Table(header_style="bold")
    table.add_column("phase")
    for gpu in gpus:
        table.add_column(f"GPU {gpu}")
    for placement in plan.placements:
        table.add_row(_PHASES[placement.role], *(_cell(placement, gpu) for gpu in gpus))
    table.add_row("train", *(f"trainer rank {gpu}" if gpu < ranks else "-" for gpu in gpus))
    return table


def _cell(placement: Placement, gpu: int) -> str:
    offset = gpu - placement.bundle_start
    if not 0 <= offset < placement.num_gpus:
        return "-"
    return f"{placement.role} {placement.model_id} #{offset // placement.gpus_per_engine}"


def _reserved(checked: Checked) -> str:
    train = checked.recipe.train
    shares = [0.0] * checked.plan.total_required_gpus
    for placement in checked.plan.placements:
        for gpu in placement.heads:
            shares[gpu] += placement.ray_gpu_fraction
    for gpu in range(train.ranks):
        shares[gpu] += train.ray_gpu_fraction
    return ", ".join(f"{share:g}" for share in shares)
