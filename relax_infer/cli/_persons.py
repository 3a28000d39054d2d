"""What a person asks of a run: pause, resume, stop, resolve, report."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._options import HOME, Home, Json, Run, app

if TYPE_CHECKING:
    from relax_infer.cli._runs import Runs
    from relax_infer.contracts.run import RunStatus


@app.command()
def pause(run: Run, home: Home = HOME) -> None:
    """End the current step and begin no other."""
    _ask(home, lambda runs: runs.ask(run, "pause"))


@app.command()
def resume(run: Run, home: Home = HOME) -> None:
    """Go on after a pause."""
    _ask(home, lambda runs: runs.ask(run, "resume"))


@app.command()
def stop(run: Run, home: Home = HOME) -> None:
    """End the run after the current step; its files stay."""
    _ask(home, lambda runs: runs.ask(run, "stop"))


@app.command()
def resolve(
    run: Run,
    who: Annotated[str, typer.Option(help="Your name; it is kept with the run.")],
    why: Annotated[str, typer.Option(help="What you saw, or changed.")],
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
    if not who.strip() or not why.strip():
        raise CommandError(
            "--who and --why must not be empty.", cure="They are kept with the run's history."
        )
    if stop and restart:
        raise CommandError("--stop and --restart exclude each other.", cure="Choose one.")
    from relax_infer.contracts.run import ResolveRun

    resolution = ResolveRun(
        who=who,
        why=why,
        action="stop" if stop else "restart" if restart else "retry",
        confirm_released=confirm_released,
    )
    _ask(home, lambda runs: runs.resolve(run, resolution))


@app.command()
def report(
    run: Run,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The HTML file [RUN.html].")
    ] = None,
    home: Home = HOME,
) -> None:
    """Write one HTML file about a run: curves, steps, who held the GPUs when."""
    from relax_infer.cli._reports import report_of

    typer.echo(f"Report: {asyncio.run(report_of(home, run, out or Path(f'{run}.html')))}")


@app.command()
def samples(
    run: Run,
    step: Annotated[int, typer.Argument(min=0, help="Number of the step.", metavar="STEP")],
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


def _ask(home: Path, ask: "Callable[[Runs], Awaitable[RunStatus]]") -> None:
    typer.echo(asyncio.run(_answer(home, ask)))


async def _answer(home: Path, ask: "Callable[[Runs], Awaitable[RunStatus]]") -> str:
    from relax_infer.cli._glance import Glance
    from relax_infer.cli._runs import Runs
    from relax_infer.cli._server import connected
    from relax_infer.cli._view import state_line

    async with connected(home) as server:
        return state_line(Glance(await ask(Runs(server.client, server.target.address))))
