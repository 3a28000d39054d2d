"""``relax-infer logs``: the lines of a run's parts, in the order of their times."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from relax_infer.cli._errors import CommandError
from relax_infer.cli._home import read_stack
from relax_infer.cli._log_files import LogFile, LogLine, find_logs, lines_of
from relax_infer.cli._log_levels import Loud
from relax_infer.cli._recipes import check_run_id
from relax_infer.cli._reports import store_with
from relax_infer.cli._steps import record_of

_POLL = 0.5
_SLACK = 1.0
"""Seconds around a step whose lines count as its own: some logs tell whole seconds."""
Span = tuple[float, float]


def show_logs(
    home: Path,
    run: str,
    *,
    role: str | None,
    replica: int | None,
    step: int | None,
    level: str | None,
    tail: int | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Print them; with ``follow`` until interrupted.

    Raises:
        CommandError: there is no log, or nobody knows when the step was.
    """
    check_run_id(run)
    ray = _ray_folders(home)
    files = find_logs(home, run, role, replica, ray)
    span = (0.0, float("inf")) if step is None else asyncio.run(_span(home, run, step))
    read: dict[Path, int] = {}
    of_level = list[LogLine] if level is None else Loud(level).of
    lines = of_level(_new(files, read, step, span))
    _print(lines if tail is None else lines[-tail:], as_json=as_json)
    while follow and time.time() < span[1]:
        time.sleep(_POLL)
        files = find_logs(home, run, role, replica, ray)  # a replica that is rebuilt begins another
        _print(of_level(_new(files, read, step, span)), as_json=as_json)


def _ray_folders(home: Path) -> list[Path]:
    """Where Ray's workers write while the stack runs, and where `down` keeps that."""
    stack = read_stack(home)
    live = [stack.ray_folder / "session_latest" / "logs"] if stack and stack.ray_folder else []
    return [home / "logs" / "ray", *live]


def _new(
    files: Sequence[LogFile], read: dict[Path, int], step: int | None, span: Span
) -> list[LogLine]:
    """Lines that were not read before, oldest first."""
    found: list[LogLine] = []
    for file in files:
        lines, read[file.path] = lines_of(file, read.get(file.path, 0))
        found += (line for line in lines if step is None or line.in_step(step, span))
    found.sort(key=lambda line: line.at)
    return found


def _print(lines: Iterable[LogLine], *, as_json: bool) -> None:
    for line in lines:
        typer.echo(json.dumps(asdict(line)) if as_json else f"{line.source} | {line.text}")


async def _span(home: Path, run: str, step: int) -> Span:
    """When the step was at work; open to the end while it is."""
    store = store_with(home, run)
    record = record_of(store, run, step) if store is not None else None
    if record is not None and record.result.phases:
        phases = record.result.phases
        last = phases[-1]
        return phases[0].started - _SLACK, last.started + last.seconds + _SLACK
    from relax_infer.cli._runs import runs_of
    from relax_infer.cli._server import connected
    from relax_infer.cli._watching import step_history

    async with connected(home) as server:
        told = await step_history(runs_of(server), run, step)
    if told is None or not told.began:
        raise CommandError(
            f"Nobody knows when step {step} of run {run} was at work",
            cure=f"`relax-infer steps list {run}` lists its steps.",
        )
    return told.began - _SLACK, float("inf") if told.ended is None else told.ended + _SLACK
