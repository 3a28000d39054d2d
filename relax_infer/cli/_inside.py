"""What can be read of runs: their list, steps, logs, samples and report."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from relax_infer.cli._completion import complete_role
from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Home, Json, Run, Step, app
from relax_infer.cli._persons import step as step_commands

runs = typer.Typer(no_args_is_help=True, help="All runs.")
app.add_typer(runs, name="runs")
steps = typer.Typer(no_args_is_help=True, help="The steps of a run.")
app.add_typer(steps, name="steps")


@runs.command("list", epilog=epilog("runs list"))
def list_runs(
    only_open: Annotated[bool, typer.Option("--open", help="Only runs that go on.")] = False,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Every run that the server remembers, newest first."""
    from relax_infer.cli._status import show_all

    asyncio.run(show_all(home, as_json=as_json, only_open=only_open))


@steps.command("list", epilog=epilog("steps list"))
def list_steps(run: Run, as_json: Json = False, home: Home = HOME) -> None:
    """Every step of a run: how it ended or where it is, and what it is judged by."""
    from relax_infer.cli._steps import list_steps as find
    from relax_infer.cli._view import step_line

    found = asyncio.run(find(home, run))
    if as_json:
        typer.echo(json.dumps([line.document() for line in found], indent=2))
        return
    for line in found:
        typer.echo(step_line(line.step, line.phase, line.progress, line.error))
    if not found:
        typer.echo(f"No step of run {run} has begun.")


@step_commands.command(epilog=epilog("step explain"))
def explain(run: Run, number: Step, as_json: Json = False, home: Home = HOME) -> None:
    """Why a step is where it is: its phases, what it waits for, what failed, what you can do.

    Exit code 1 if it failed, 3 if it waits for a person.
    """
    from relax_infer.cli._explain import phase_text
    from relax_infer.cli._steps import explain_step

    answer, known = asyncio.run(explain_step(home, run, number))
    if as_json:
        typer.echo(json.dumps({"run": run, "step": number, **answer.document()}, indent=2))
        raise typer.Exit(answer.code)
    typer.echo(answer.headline)
    for k, phase in enumerate(answer.phases):
        at_work = known.at_work and k == len(answer.phases) - 1
        typer.echo(f"  {phase_text(phase, known.expected, at_work=at_work)}")
    for line in (*answer.notes, *answer.cures):
        typer.echo(line)
    raise typer.Exit(answer.code)


@app.command(epilog=epilog("logs"))
def logs(
    run: Run,
    role: Annotated[
        str | None,
        typer.Option(
            help="rollout, genrm, teacher, trainer, gateway, router or worker.",
            autocompletion=complete_role,
        ),
    ] = None,
    replica: Annotated[int | None, typer.Option(min=0, help="Number of the engine.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only what was written while it was at work.")
    ] = None,
    level: Annotated[
        str | None, typer.Option(help="warning or error: only lines as bad as that, or worse.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only so many of the last lines.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """The logs of a run's parts on this machine, in the order of time."""
    from relax_infer.cli._log_files import ROLES
    from relax_infer.cli._log_levels import LEVELS
    from relax_infer.cli._logs import show_logs

    if role is not None and role not in ROLES:
        raise CommandError(f"--role {role} is no role", cure=f"Roles: {', '.join(ROLES)}.")
    if level is not None and level not in LEVELS:
        raise CommandError(f"--level {level} is none", cure=f"Levels: {', '.join(LEVELS)}.")
    show_logs(
        home,
        run,
        role=role,
        replica=replica,
        step=step,
        level=level,
        tail=tail,
        follow=follow,
        as_json=as_json,
    )


@app.command(epilog=epilog("report"))
def report(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The HTML file [RUN.html].")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Only these steps, as 3-9, 7 or 3-.")
    ] = None,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """Write one HTML file about a run: curves, time, GPUs, incidents and a sample browser.

    It needs no network, and nothing of the run has to be at work.
    """
    from relax_infer.cli._reports import report_of

    path = asyncio.run(report_of(home, run, out or Path(f"{run}.html"), steps))
    typer.echo(json.dumps({"run": run, "report": str(path)}) if as_json else f"Report: {path}")


@app.command(epilog=epilog("samples"))
def samples(
    run: Run,
    step: Step,
    group: Annotated[int | None, typer.Option(min=0, help="Only this prompt's samples.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD<VALUE", help="Only samples like 'reward<0.5'; repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Samples to show at most.")] = 20,
    as_json: Json = False,
    home: Home = HOME,
) -> None:
    """The staged samples of a step: scored ones, or what there is of them by now."""
    from relax_infer.cli._samples import find, show_samples

    found = asyncio.run(find(home, run, step, group, where or []))
    show_samples(found, run, step, limit, as_json=as_json)
