"""Watching a run until it is over or waits for a person."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import typer
from rich.console import Console
from rich.live import Live

from relax_infer.cli._board import board
from relax_infer.cli._errors import Code
from relax_infer.cli._glance import Glance
from relax_infer.cli._runs import NobodyAnswersError, heed_interrupt
from relax_infer.cli._view import (
    blocked_lines,
    finished_line,
    phase_line,
    replica_line,
    state_line,
    work_line,
)
from relax_infer.cli._watching import Watcher
from relax_infer.machines import RunState

POLL = 0.5
"""Seconds between two looks."""
_SILENCE = 15.0
"""Seconds without an answer after which a person is told."""


class View(Protocol):
    """Shows one look after another."""

    def show(self, glance: Glance) -> None: ...
    def silent(self, why: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    """What changed, a line each; for logs and pipes.

    Args:
        detailed: also what replicas do, and how long each phase took.
    """

    def __init__(
        self, say: Callable[[str], object] = typer.echo, *, detailed: bool = False
    ) -> None:
        self._say, self._detailed = say, detailed
        self._phases = 0.0
        self._last: dict[str, str] = {}
        self._finished = -1

    def show(self, glance: Glance) -> None:
        for progress in glance.run.progress:
            if progress.step > self._finished:
                self._finished = progress.step
                self._say(finished_line(progress))
        self._once("state", state_line(glance))
        if self._detailed:
            self._details(glance)
        if (work := work_line(glance)) is not None and not glance.over:
            self._once("work", work)
        self._last.pop("silent", None)

    def _details(self, glance: Glance) -> None:
        for phase in glance.phases[:-1]:
            if phase.started > self._phases:
                self._phases = phase.started
                self._say(phase_line(glance, phase))
        for group in glance.groups:
            for replica in group.replicas:
                self._once(f"{group.role}/{replica.engine_id}", replica_line(group, replica))

    def silent(self, why: str) -> None:
        self._once("silent", why)

    def close(self) -> None:
        pass

    def _once(self, kind: str, line: str) -> None:
        if self._last.get(kind) != line:
            self._last[kind] = line
            self._say(line)


class Panel:
    """The newest look in place; for terminals."""

    def __init__(self, console: Console, page: str | None) -> None:
        self._page = page
        self._glance: Glance | None = None
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()

    def show(self, glance: Glance) -> None:
        self._glance = glance
        self._live.update(board(glance, self._page))

    def silent(self, why: str) -> None:
        if self._glance is not None:
            self._live.update(board(self._glance, self._page, note=why))

    def close(self) -> None:
        self._live.stop()


def make_view(page: str | None, *, detailed: bool = False) -> View:
    """A board on a terminal, lines anywhere else."""
    console = Console()
    return Panel(console, page) if console.is_terminal else Lines(detailed=detailed)


async def follow(watcher: Watcher, view: View) -> Glance:
    """Look again and again; the look at which the run was done, failed or blocked.

    A worker or a server that is away is waited for: the run is theirs to lose, not ours.
    """
    heard = time.monotonic()
    try:
        while True:
            try:
                glance = await watcher.look()
            except NobodyAnswersError as error:
                heed_interrupt()
                if time.monotonic() - heard > _SILENCE:
                    view.silent(str(error))
            else:
                heard = time.monotonic()
                view.show(glance)
                if glance.over or glance.run.state is RunState.BLOCKED:
                    return glance
            await asyncio.sleep(POLL)
    finally:
        view.close()


def code_of(glance: Glance) -> Code:
    """How a command that looked at a run ends."""
    match glance.run.state:
        case RunState.FAILED:
            return Code.FAILED
        case RunState.BLOCKED:
            return Code.BLOCKED
        case _:
            return Code.DONE


def say_ending(glance: Glance, say: Callable[[str], object] = typer.echo) -> None:
    """What a person is left with, after the last look."""
    if glance.run.state is RunState.BLOCKED:
        for line in blocked_lines(glance):
            say(line)
