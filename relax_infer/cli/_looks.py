"""What can be looked at without a run: plan, config, doctor; and the worker's own process."""

import asyncio
import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from relax_infer.cli._errors import Code
from relax_infer.cli._options import HOME, Assignments, Home, Json, Recipe, app

config = typer.Typer(no_args_is_help=True, help="Recipes.")
app.add_typer(config, name="config")


class Queue(StrEnum):
    """What a worker may work on."""

    WORKFLOWS = "relax"
    ENGINES = "relax-engines"
    TRAIN = "relax-train"


@app.command()
def plan(
    recipe: Recipe,
    assignments: Assignments = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also look whether the cluster that is there can run it.")
    ] = False,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Which GPUs each role gets, phase by phase, or every reason why not. Starts nothing."""
    from relax_infer.cli._plan import show_plan
    from relax_infer.cli._recipes import check

    checked = check(recipe, assignments or [])
    if not live:
        show_plan(checked, as_json=as_json)
        return
    from relax_infer.cli._live import examine_live

    findings = asyncio.run(examine_live(checked, home))
    show_plan(checked, as_json=as_json, findings=findings)
    if any(finding.result == "missing" for finding in findings):
        raise typer.Exit(Code.BAD_INPUT)


@config.command()
def show(
    recipe: Recipe,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """A recipe with every default filled in, as YAML."""
    import json

    import yaml

    from relax_infer.cli._recipes import load
    from relax_infer.config import parse_overrides

    document = load(recipe, parse_overrides(assignments or [])).model_dump(mode="json")
    text = json.dumps(document, indent=2) if as_json else yaml.safe_dump(document, sort_keys=False)
    typer.echo(text.rstrip())


@app.command()
def doctor(as_json: Json = False, home: Home = HOME) -> None:
    """What this machine has, what is missing, and what to do. Exit code 1 if something must be."""
    from relax_infer.cli._doctor import examine
    from relax_infer.cli._findings import show_findings

    findings = asyncio.run(examine(home))
    show_findings(findings, as_json=as_json)
    if any(finding.result == "missing" for finding in findings):
        raise typer.Exit(Code.FAILED)


@app.command()
def worker(
    queues: Annotated[
        list[Queue] | None, typer.Option("--queue", help="Task queue, repeatable [all].")
    ] = None,
    home: Home = HOME,
) -> None:
    """Run a worker here until Ctrl-C: of the local stack, if there is one.

    Otherwise of the servers that TEMPORAL_ADDRESS and RAY_ADDRESS name.
    """
    from relax_infer.cli._local import worker_environment

    variables = worker_environment(home)
    words = ["--queues", *(str(queue) for queue in queues)] if queues else []
    sys.stdout.flush()
    # -P: the current folder may hold another package named workers or workflows.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "workers.worker", *words], variables)
