"""``relax-infer run``: from a recipe to the last step, on a stack that is started if none runs."""

import asyncio
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import typer

from relax_infer.cli._errors import INTERRUPTED, Code, CommandError, complain
from relax_infer.cli._follow import code_of, follow, make_view, say_ending
from relax_infer.cli._glance import Glance
from relax_infer.cli._home import LocalStack, read_stack
from relax_infer.cli._local import end_stack, runs_that_go_on, start_stack
from relax_infer.cli._machine import gpu_count
from relax_infer.cli._needs import require_needs
from relax_infer.cli._options import said_home
from relax_infer.cli._recipes import Checked, check, check_run_id
from relax_infer.cli._reports import report
from relax_infer.cli._runs import NobodyAnswersError, Runs, open_runs, runs_of
from relax_infer.cli._server import Server, connected, find_target
from relax_infer.cli._watching import Watcher
from relax_infer.config import require_runnable
from relax_infer.contracts.failures import RelaxError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import BeginFrom

_IDS = 1000
"""Ids that are tried before a person must name one."""


@dataclass(frozen=True)
class Wishes:
    """The command's options."""

    home: Path
    run: str | None
    report: Path | None
    down: bool
    watch: bool
    memory_gib: float | None
    begin_from: BeginFrom | None = None


def run(recipe: str, assignments: list[str], steps: int | None, wishes: Wishes) -> int:
    """Carry the command out; its exit code.

    Raises:
        RelaxError: it cannot be done; a stack that this command started is down again.
    """
    checked = check(recipe, assignments, steps)
    if wishes.begin_from is not None:
        check_run_id(wishes.begin_from.run)
        start = checked.start.model_copy(update={"begin_from": wishes.begin_from})
        checked = replace(checked, start=start)
    require_runnable(checked.recipe)
    if wishes.run is not None:
        check_run_id(wishes.run)
    _check_report(wishes.report)
    before = read_stack(wishes.home)
    local = before is not None or find_target(wishes.home) is None
    if local and wishes.begin_from is not None:
        _check_earlier(wishes.begin_from, wishes.home, checked)
    if local:
        running = runs_that_go_on(wishes.home)
        if wishes.run not in running:
            require_needs(checked.recipe, before, running)
    stack = _bring_up(wishes, checked) if local else None
    begun = _Begun()
    try:
        glance = asyncio.run(_begin_and_watch(wishes, checked, begun))
    except BaseException as error:
        if begun.run is None:
            if stack is not None and (before is None or before.stack != stack.stack):
                typer.echo("Ends the local stack that was started for this run.")
                end_stack(wishes.home, typer.echo)
            raise
        if not isinstance(error, KeyboardInterrupt):
            raise
        look = f"relax-infer status {begun.run}{said_home(wishes.home)}"
        typer.echo(f"Run {begun.run} goes on; `{look}` looks at it.")
        return INTERRUPTED
    if glance is None:
        return Code.DONE
    code = _hand_over(glance, wishes)
    if wishes.down and stack is not None:
        return max(code, _end(glance, wishes))
    if stack is not None and (before is None or before.stack != stack.stack):
        typer.echo(f"The local stack stays up; `relax-infer down{said_home(wishes.home)}` ends it.")
    return code


def _check_earlier(earlier: BeginFrom, home: Path, checked: Checked) -> None:
    """Before anything starts; on another machine's store only the worker can look.

    Raises:
        RelaxError: there is nothing to go on from, or nothing left to train.
    """
    from relax_infer.training import find_heritage

    store = checked.recipe.staging.url or (home.resolve() / "store").as_uri()
    target = checked.start.steps or checked.recipe.steps
    find_heritage(RunRef(run=earlier.run, store=store), earlier.step, target=target)


def _bring_up(wishes: Wishes, checked: Checked) -> LocalStack:
    """The local stack, with the GPUs that the recipe wants."""
    wanted = checked.recipe.cluster.gpus
    options: list[str] = []
    if gpu_count() == 0:
        options += ["--at-least", str(wanted)]
    if wishes.memory_gib is not None:
        options += ["--memory-gib", str(wishes.memory_gib)]
    return start_stack(wishes.home, options, typer.echo)


@dataclass
class _Begun:
    """Whether there is a run that goes on without us."""

    run: str | None = None


async def _begin_and_watch(wishes: Wishes, checked: Checked, begun: _Begun) -> Glance | None:
    """Start the run or attach to it, and watch it; the last look, None with --no-follow.

    One event loop for both: between two, an interrupt may be lost.
    """
    async with connected(wishes.home) as server:
        runs = runs_of(server)
        words = "is started"
        if wishes.run is None:
            begun.run = await _start_fresh(runs, server, checked)
        elif await runs.is_open(wishes.run):
            begun.run = wishes.run
            words = "goes on already, with the recipe it was started with"
            ignored = ["--steps"] if checked.start.steps is not None else []
            if ignored := [*ignored, *sorted(checked.start.overrides)]:
                words += f"; ignored here: {', '.join(ignored)}"
        else:
            begun.run = await _start_as(runs, server, checked, wishes.run)
        typer.echo(f"Run {begun.run} {words}.")
        page = server.target.page_of(begun.run)
        if page is not None:
            typer.echo(f"Web UI: {page}")
        if not wishes.watch:
            return None
        # Plain lines have no room for what costs more.
        watcher = Watcher(runs, begun.run, detailed=sys.stdout.isatty())
        return await follow(watcher, make_view(page))


async def _start_as(runs: Runs, server: Server, checked: Checked, run: str) -> str:
    files = _files_of(run, server, checked)
    if files is not None:
        raise _used(run, f"its files are in {files}")
    if not await runs.start(run, checked.start):
        raise _used(run, f"`relax-infer status {run}` says how it ended")
    return run


def _used(run: str, where: str) -> CommandError:
    return CommandError(
        f"The run id {run} was used before: {where}.",
        cure=f"Choose another --run-id, or leave it out; --from {run} goes on where it ended.",
    )


async def _start_fresh(runs: Runs, server: Server, checked: Checked) -> str:
    """Under the next free number of the local stack, under the time anywhere else."""
    if server.target.home is None:
        identity = datetime.now().strftime("run-%Y%m%d-%H%M%S")
        return await _start_as(runs, server, checked, identity)
    for k in range(1, _IDS):
        identity = f"run-{k}"
        if _files_of(identity, server, checked) is not None:
            continue
        if await runs.start(identity, checked.start):
            return identity
    raise CommandError(f"run-1 to run-{_IDS - 1} are all used.", cure="Name one with --run-id.")


def _files_of(run: str, server: Server, checked: Checked) -> Path | None:
    """Folder of an earlier run of that id that Temporal may have forgotten."""
    if server.target.home is None or checked.recipe.staging.url is not None:
        return None
    folder = server.target.home / "store" / run
    return folder if folder.exists() else None


def _hand_over(glance: Glance, wishes: Wishes) -> int:
    """Last words and the report; a report that fails does not undo a run."""
    say_ending(glance)
    code = int(code_of(glance))
    if wishes.report is None:
        return code
    try:
        typer.echo(f"Report: {report(glance.run, wishes.report)}")
    except (RelaxError, OSError) as error:
        complain(f"no report: {error}")
        return max(code, Code.FAILED)
    return code


def _end(glance: Glance, wishes: Wishes) -> int:
    """--down: not while somebody needs the stack."""
    if not glance.over:
        typer.echo(
            "The local stack stays up: the run waits for a person. Afterwards"
            f" `relax-infer down{said_home(wishes.home)}` ends the stack."
        )
        return Code.DONE
    others = asyncio.run(_others(wishes.home, glance.run.run))
    if others:
        typer.echo(
            f"The local stack stays up: {', '.join(others)} still goes on. Afterwards"
            f" `relax-infer down{said_home(wishes.home)}` ends the stack."
        )
        return Code.DONE
    try:
        end_stack(wishes.home, typer.echo)
    except RelaxError as error:
        complain(str(error))
        return Code.FAILED
    return Code.DONE


async def _others(home: Path, run: str) -> list[str]:
    try:
        return [each for each in await open_runs(home) if each != run]
    except NobodyAnswersError:
        return []


def _check_report(path: Path | None) -> None:
    if path is not None and path.is_dir():
        raise CommandError(f"--report {path} is a folder.", cure="Name a file.")
