"""What a person asks of a run: pause, resume, stop, resolve, step retry."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._examples import epilog
from relax_infer.cli._options import HOME, Home, Run, Step, Who, Why, app

if TYPE_CHECKING:
    from relax_infer.cli._runs import Runs
    from relax_infer.contracts.run import ResolveRun, RunStatus

step = typer.Typer(no_args_is_help=True, help="One step of a run: why it is where it is.")
app.add_typer(step, name="step")


@app.command(epilog=epilog("pause"))
def pause(run: Run, home: Home = HOME) -> None:
    """End the current step and begin no other."""
    _ask(home, run, "pause")


@app.command(epilog=epilog("resume"))
def resume(run: Run, home: Home = HOME) -> None:
    """Go on after a pause."""
    _ask(home, run, "resume")


@app.command(epilog=epilog("stop"))
def stop(run: Run, home: Home = HOME) -> None:
    """End the run after the current step; its files stay."""
    _ask(home, run, "stop")


@app.command(epilog=epilog("resolve"))
def resolve(
    run: Run,
    who: Who,
    why: Why,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the run; without: try again.")] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Stop every engine, with proof, and start all anew first."),
    ] = False,
    confirm_released: Annotated[
        bool,
        typer.Option(
            "--confirm-released",
            help="You looked at the node, or fenced off one that does not answer: the"
            " role that is named has let go of its GPUs.",
        ),
    ] = False,
    home: Home = HOME,
) -> None:
    """Answer a run that is BLOCKED."""
    _check_words(who, why)
    if stop and restart:
        raise CommandError("--stop and --restart exclude each other.", cure="Choose one.")
    from relax_infer.contracts.run import ResolveRun

    resolution = ResolveRun(
        who=who,
        why=why,
        action="stop" if stop else "restart" if restart else "retry",
        confirm_released=confirm_released,
    )
    _ask(home, run, "resolve", resolution)


@step.command(epilog=epilog("step retry"))
def retry(run: Run, number: Step, who: Who, why: Why, home: Home = HOME) -> None:
    """Try a step again that gave up. What it staged, trained or synced is not done twice."""
    _check_words(who, why)
    from relax_infer.cli._steps import retry_step
    from relax_infer.contracts.run import ResolveRun

    resolution = ResolveRun(who=who, why=why)
    _say(retry_step(home, run, number, resolution))


def _check_words(who: str, why: str) -> None:
    if not who.strip() or not why.strip():
        raise CommandError(
            "--who and --why must not be empty.", cure="They are kept with the run's history."
        )


def _ask(home: Path, run: str, request: Any, resolution: "ResolveRun | None" = None) -> None:
    from relax_infer.cli._asking import ask

    _say(_connected(home, lambda runs: ask(runs, run, request, resolution)))


async def _connected(
    home: Path, work: "Callable[[Runs], Coroutine[Any, Any, RunStatus]]"
) -> "RunStatus":
    from relax_infer.cli._runs import runs_of
    from relax_infer.cli._server import connected

    async with connected(home) as server:
        return await work(runs_of(server))


def _say(answer: "Coroutine[Any, Any, RunStatus]") -> None:
    from relax_infer.cli._glance import Glance
    from relax_infer.cli._view import state_line

    typer.echo(state_line(Glance(asyncio.run(answer))))
