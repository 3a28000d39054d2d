"""Stack and runs: up, down, run, status. Commands import what they need when they run, so that
``--help`` is quick.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._completion import complete_run
from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Assignments, Home, Json, Memory, Recipe, app, said_home


@app.command(epilog=epilog("up"))
def up(
    home: Home = HOME,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="GPUs, pretended ones where the machine has none [as the last stack here; else"
            " the machine's own, or 2].",
        ),
    ] = None,
    memory_gib: Memory = None,
    worker: Annotated[bool, typer.Option(help="With a worker.")] = True,
    temporal_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Of the Temporal server [7233 if it is free, else another]."
        ),
    ] = None,
    ui_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Of Temporal's web UI [8233 if it is free, else another]."
        ),
    ] = None,
    ray_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the Ray head [a free one].")
    ] = None,
) -> None:
    """Start the local stack: Temporal, Ray and a worker. Starts again what has died of it."""
    from relax_infer.cli._local import runs_that_go_on, start_stack

    values = {
        "--gpus": gpus,
        "--memory-gib": memory_gib,
        "--temporal-port": temporal_port,
        "--ui-port": ui_port,
        "--ray-port": ray_port,
    }
    options = [w for name, v in values.items() if v is not None for w in (name, str(v))]
    stack = start_stack(home, options if worker else [*options, "--no-worker"], typer.echo)
    typer.echo(f"Web UI:   {stack.temporal_ui}")
    typer.echo(f"Temporal: {stack.temporal_address}")
    typer.echo(f"Ray:      {stack.ray_address}")
    if running := runs_that_go_on(home):
        typer.echo(f"Goes on:  {', '.join(running)}")
        typer.echo(f"Next:     relax-infer status {running[0]} --watch{said_home(home)}")
    else:
        typer.echo(f"Next:     relax-infer run quickstart{said_home(home)}")


@app.command(epilog=epilog("down"))
def down(home: Home = HOME) -> None:
    """End every process of the local stack. Runs and their files stay; `up` goes on with them."""
    from relax_infer.cli._local import end_stack_under_runs

    end_stack_under_runs(home, typer.echo)


@app.command(epilog=epilog("run"))
def run(
    recipe: Recipe,
    run_id: Annotated[
        str | None,
        typer.Option(
            help="Id of a new run, or of one that goes on: attach to it.",
            autocompletion=complete_run,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    assignments: Assignments = None,
    begin_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Go on from this run's last checkpoint; steps count on.",
            autocompletion=complete_run,
        ),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(min=1, help="Of --from: an earlier step, whose checkpoint is kept."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the HTML report at the end.")
    ] = None,
    down: Annotated[
        bool, typer.Option("--down", help="End the local stack when the run is over.")
    ] = False,
    follow: Annotated[bool, typer.Option(help="Watch the run until it is over.")] = True,
    memory_gib: Memory = None,
    home: Home = HOME,
) -> None:
    """Start a run and watch it; starts the local stack if no Temporal server is set.

    Ctrl-C stops watching, not the run.
    """
    from relax_infer.cli._run import Wishes
    from relax_infer.cli._run import run as carry_out
    from relax_infer.contracts.run import BeginFrom

    if not follow and (down or report is not None):
        raise CommandError(
            "--no-follow does not wait for the end of the run, --down and --report do.",
            cure="Leave one of them out; `relax-infer report` writes the report later.",
        )
    if from_step is not None and begin_from is None:
        raise CommandError("--from-step needs --from.", cure="Name the run: --from RUN.")
    earlier = BeginFrom(run=begin_from, step=from_step) if begin_from else None
    wishes = Wishes(home, run_id, report, down, follow, memory_gib, earlier)
    raise typer.Exit(carry_out(recipe, assignments or [], steps, wishes))


@app.command(epilog=epilog("status"))
def status(
    run: Annotated[
        str | None,
        typer.Argument(help="Run id; none: all runs.", metavar="RUN", autocompletion=complete_run),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Go on until the run is over or waits for a person."),
    ] = False,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Where a run stands, or all of them. Of one run: exit code 1 if it failed, 3 if blocked.

    With --watch a board on a terminal, a line for every change anywhere else, and with --json a
    document for every change.
    """
    from relax_infer.cli._status import show_all, show_one, watch_one

    if run is None and watch:
        raise CommandError(
            "--watch is for one run.", cure="Name it: relax-infer status RUN --watch."
        )
    if run is None:
        asyncio.run(show_all(home, as_json=as_json))
        return
    show = watch_one if watch else show_one
    raise typer.Exit(asyncio.run(show(home, run, as_json=as_json)))


def main() -> None:
    """The ``relax-infer`` command."""
    import os
    import sys

    try:
        app()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        if "temporalio" in sys.modules:
            # Threads of its core may still hold an answer; they abort an interpreter that ends.
            os._exit(code)
        raise
