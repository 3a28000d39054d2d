"""What needs no run: plan, config, doctor, env; and the worker's own process."""

import asyncio
import os
import sys
from enum import StrEnum
from typing import Annotated

import typer

from relax_infer.cli._errors import Code
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Assignments, Home, Json, Recipe, app

config = typer.Typer(no_args_is_help=True, help="Recipes.")
app.add_typer(config, name="config")


class Queue(StrEnum):
    """What a worker may work on."""

    WORKFLOWS = "relax"
    ENGINES = "relax-engines"
    TRAIN = "relax-train"


@app.command(epilog=epilog("plan"))
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
    from relax_infer.cli._live import examine_live
    from relax_infer.cli._plan import show_plan, show_refusal
    from relax_infer.cli._recipes import CannotBePlacedError, check
    from relax_infer.config import RecipeError
    from relax_infer.placement import Violation

    try:
        checked = check(recipe, assignments or [])
    except RecipeError as error:
        cure = error.cure or "Write it as a recipe."
        show_refusal((Violation("recipe", error.message, cure),), as_json=as_json)
        raise
    except CannotBePlacedError as refused:
        known = refused.recipe if live else None
        findings = asyncio.run(examine_live(known, None, home)) if known is not None else None
        show_refusal(
            refused.violations, as_json=as_json, findings=findings, cured_by=refused.cured_by
        )
        raise
    findings = asyncio.run(examine_live(checked.recipe, checked.plan, home)) if live else None
    show_plan(checked, as_json=as_json, findings=findings)
    if findings is not None and any(finding.result == "missing" for finding in findings):
        raise typer.Exit(Code.BAD_INPUT)


@config.command(epilog=epilog("config show"))
def show(
    recipe: Recipe,
    assignments: Assignments = None,
    resolved: Annotated[
        bool,
        typer.Option(
            "--resolved",
            help="Also fill in what other fields and this machine decide: GPUs of each role, Ray's"
            " shares, folders.",
        ),
    ] = False,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """A recipe with every default filled in, as YAML."""
    import json

    import yaml

    from relax_infer.cli._recipes import load, resolve
    from relax_infer.config import parse_overrides

    if resolved:
        document = resolve(recipe, assignments or [], home).model_dump(mode="json")
    else:
        document = load(recipe, parse_overrides(assignments or [])).model_dump(mode="json")
    text = json.dumps(document, indent=2) if as_json else yaml.safe_dump(document, sort_keys=False)
    typer.echo(text.rstrip())


@config.command(epilog=epilog("config schema"))
def schema() -> None:
    """The JSON schema of recipes, for editors and checkers."""
    import json

    from relax_infer.config.schema import recipe_schema

    typer.echo(json.dumps(recipe_schema(), indent=2))


@app.command(epilog=epilog("doctor"))
def doctor(as_json: Json = False, home: Home = HOME) -> None:
    """What this machine has, what is missing, and what to do. Exit code 1 if something must be."""
    from relax_infer.cli._doctor import examine
    from relax_infer.cli._findings import show_findings

    findings = asyncio.run(examine(home))
    show_findings(findings, as_json=as_json)
    if any(finding.result == "missing" for finding in findings):
        raise typer.Exit(Code.FAILED)


@app.command(epilog=epilog("env"))
def env(as_json: Json = False, home: Home = HOME) -> None:
    """Variables that lead Temporal's and Ray's own tools to the local stack, for a shell to
    evaluate."""
    import json
    import shlex

    from relax_infer.cli._errors import CommandError
    from relax_infer.cli._home import read_stack

    stack = read_stack(home)
    if stack is None:
        raise CommandError(f"No local stack in {home}.", cure="Start one with `relax-infer up`.")
    if as_json:
        typer.echo(json.dumps(stack.variables, indent=2))
        return
    for name, value in stack.variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command(epilog=epilog("worker"))
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
