"""The staged samples of a step, as a table, as lines or as JSON."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from relax_infer.cli._errors import CommandError
from relax_infer.cli._recipes import check_run_id
from relax_infer.cli._reports import store_with
from relax_infer.contracts.refs import RunRef
from relax_infer.samples.looking import Condition, Found, look
from relax_infer.samples.store import StagingStore

_NARROW = 60
"""Characters of a text in a terminal's table."""


async def find(home: Path, run: str, step: int, group: int | None, where: list[str]) -> Found:
    """The samples of a step. Of the local stack also when nothing of it runs any more.

    Raises:
        RelaxError: there is no such run or step, or a condition cannot be used.
    """
    check_run_id(run)
    conditions = [Condition.parse(text) for text in where]
    url = store_with(home, run) or await _store_of(home, run)
    return look(StagingStore(RunRef(run=run, store=url)), step, conditions, group)


async def _store_of(home: Path, run: str) -> str:
    """Where the run keeps its files, by its own word."""
    from relax_infer.cli._runs import runs_of
    from relax_infer.cli._server import connected

    async with connected(home) as server:
        status = (await runs_of(server).glance(run)).run
    if status.store is None:
        raise CommandError(
            f"Run {run} keeps no files: it is {status.state}.",
            cure="Files come with its first step; `relax-infer status` says where it stands.",
        )
    return status.store


def show_samples(found: Found, run: str, step: int, limit: int, *, as_json: bool) -> None:
    """Print at most ``limit`` of them."""
    rows = found.rows.slice(0, limit).to_pylist()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console()
    if console.is_terminal:
        console.print(_table(rows))
    else:
        for row in rows:
            typer.echo(_line(row))
    match = found.rows.num_rows
    of = f"{match}" if match == found.total else f"{match} that match, of {found.total}"
    typer.echo(f"{len(rows)} of {of} {found.stage} samples of step {step}, run {run}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(header_style="bold")
    for title in ("group", "sample", "reward", "tokens"):
        table.add_column(title, justify="right")
    for title in ("end", "prompt", "response", "answer", "detail"):
        table.add_column(title, overflow="fold")
    for row in rows:
        texts = (row["prompt"], row["response"], row["answer"], row["reward_detail"] or "")
        table.add_row(
            str(row["group"]),
            str(row["sample"]),
            _reward(row),
            str(row["tokens"]),
            row["finish_reason"],
            *(_narrow(text) for text in texts),
        )
    return table


def _line(row: dict[str, Any]) -> str:
    parts = [
        f"group={row['group']}",
        f"sample={row['sample']}",
        f"reward={_reward(row)}",
        f"tokens={row['tokens']}",
        f"end={row['finish_reason']}",
        *(f"{name}={row[name]!r}" for name in ("prompt", "response", "answer")),
    ]
    if row["reward_detail"]:
        parts.append(f"detail={row['reward_detail']!r}")
    return " ".join(parts)


def _reward(row: dict[str, Any]) -> str:
    """A reward that is not there is no number here, either."""
    return "-" if row["reward"] is None else f"{row['reward']:g}"


def _narrow(text: str) -> str:
    shown = repr(text)[1:-1]  # control characters must not reach the terminal
    shown = shown if len(shown) <= _NARROW else f"{shown[: _NARROW - 1]}…"
    return shown.replace("[", r"\[")
