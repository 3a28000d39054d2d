"""``relax-infer status``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from relax_infer.cli._board import board
from relax_infer.cli._follow import code_of, follow, make_view, say_ending
from relax_infer.cli._glance import Glance
from relax_infer.cli._runs import Listed, runs_of
from relax_infer.cli._server import Target, connected
from relax_infer.cli._watching import Watcher

_PATIENCE = 20.0
"""Seconds for which a busy worker is asked again."""


async def show_one(home: Path, run: str, *, as_json: bool) -> int:
    """One run; the exit code says how it stands."""
    async with connected(home) as server:
        watcher = Watcher(runs_of(server), run)
        glance = await watcher.look(patience=_PATIENCE)
        if as_json:
            typer.echo(json.dumps(document(glance, server.target), indent=2))
        else:
            console = Console()
            console.print(board(glance, server.target.page_of(run)))
            _print_views(console, server.target.views_of(run))
        return code_of(glance)


def _print_views(console: Console, views: Mapping[str, str]) -> None:
    """To be clicked on in a terminal, which shows their names only; whole elsewhere."""
    if console.is_terminal and views:
        names = " · ".join(f"[link={link}]{name}[/link]" for name, link in views.items())
        console.print(f"web UI's lists of it: {names}")
        return
    for name, link in views.items():
        typer.echo(f"view {name:6} {link}")


async def watch_one(home: Path, run: str, *, as_json: bool) -> int:
    """One run until it is over or waits for a person."""
    async with connected(home) as server:
        watcher = Watcher(runs_of(server), run)
        page = server.target.page_of(run)
        view = Documents(server.target) if as_json else make_view(page, detailed=True)
        glance = await follow(watcher, view)
        if not as_json:
            say_ending(glance)
        return code_of(glance)


class Documents:
    """A JSON document a line, whenever something changed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: dict[str, Any] | None = None

    def show(self, glance: Glance) -> None:
        shown = document(glance, self._target)
        told = {**shown, "phases": [phase["phase"] for phase in shown["phases"]]}
        if told != self._last:
            self._last = told
            typer.echo(json.dumps(shown))

    def silent(self, why: str) -> None:
        typer.echo(why, err=True)

    def close(self) -> None:
        pass


async def show_all(home: Path, *, as_json: bool, only_open: bool = False) -> None:
    """Every run that the server remembers, newest first."""
    async with connected(home) as server:
        known = runs_of(server)
        runs = [each async for each in known.list(only_open=only_open)]
        if as_json:
            typer.echo(json.dumps([_line(each, server.target) for each in runs], indent=2))
        elif not runs:
            none = "No run goes on" if only_open else "No run yet"
            typer.echo(
                f"{none} on {server.target.address}: `relax-infer run quickstart` starts one."
            )
        for each in () if as_json else runs:
            began = each.started.astimezone().strftime("%Y-%m-%d %H:%M")
            learned = "" if each.weights is None else f"  weights {each.weights}"
            if each.reward is not None:
                learned += f"  reward {each.reward:.3f}"
            typer.echo(f"{each.run:<24} {each.state:<10} {began}{learned}")


def document(glance: Glance, target: Target) -> dict[str, Any]:
    """The run's status, with the step at work, the lease and where to look."""
    step, lease = glance.step, glance.lease
    return {
        **glance.run.model_dump(mode="json"),
        "at_work": step.model_dump(mode="json") if step else None,
        "told": glance.told,
        "gpus": lease.model_dump(mode="json", exclude={"transitions"}) if lease else None,
        "groups": [group.model_dump(mode="json") for group in glance.groups],
        "in_flight": dict(glance.load),
        "phases": [phase.model_dump(mode="json") for phase in glance.phases],
        "expected_seconds": dict(glance.expected),
        "staleness": glance.staleness,
        "tokens_per_second": glance.tokens_per_second,
        "web_ui": target.page_of(glance.run.run),
        "views": target.views_of(glance.run.run),
        "temporal_address": target.address,
    }


def _line(each: Listed, target: Target) -> dict[str, Any]:
    return {
        "run": each.run,
        "state": each.state,
        "open": each.open,
        "started": each.started.isoformat(),
        "weight_version": each.weights,
        "reward": each.reward,
        "web_ui": target.page_of(each.run),
    }
