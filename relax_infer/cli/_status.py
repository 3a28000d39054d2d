"""``relax-infer status``."""

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from relax_infer.cli._follow import code_of
from relax_infer.cli._glance import Glance
from relax_infer.cli._runs import Listed, Runs
from relax_infer.cli._server import Target, connected
from relax_infer.cli._view import panel


async def show_one(home: Path, run: str, *, as_json: bool) -> int:
    """One run; the exit code says how it stands."""
    async with connected(home) as server:
        glance = await Runs(server.client, server.target.address).glance(run)
        if as_json:
            typer.echo(json.dumps(_document(glance, server.target), indent=2))
        else:
            Console().print(panel(glance, server.target.page_of(run)))
        return code_of(glance)


async def show_all(home: Path, *, as_json: bool) -> None:
    """Every run that the server remembers, newest first."""
    async with connected(home) as server:
        runs = [each async for each in Runs(server.client, server.target.address).list()]
        if as_json:
            typer.echo(json.dumps([_line(each, server.target) for each in runs], indent=2))
        elif not runs:
            typer.echo(
                f"No run on {server.target.address} yet: `relax-infer run quickstart` starts one."
            )
        for each in () if as_json else runs:
            began = each.started.astimezone().strftime("%Y-%m-%d %H:%M")
            typer.echo(f"{each.run:<24} {each.state:<10} {began}")


def _document(glance: Glance, target: Target) -> dict[str, Any]:
    """The run's status, with the step at work, the lease and where to look."""
    step, lease = glance.step, glance.lease
    return {
        **glance.run.model_dump(mode="json"),
        "at_work": step.model_dump(mode="json") if step else None,
        "gpus": lease.model_dump(mode="json", exclude={"transitions"}) if lease else None,
        "web_ui": target.page_of(glance.run.run),
        "temporal_address": target.address,
    }


def _line(each: Listed, target: Target) -> dict[str, Any]:
    return {
        "run": each.run,
        "state": each.state,
        "open": each.open,
        "started": each.started.isoformat(),
        "web_ui": target.page_of(each.run),
    }
