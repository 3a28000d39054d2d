"""What a shell completes: run ids, recipes, roles, steps. Quick, silent, and never an error."""

import asyncio
import io
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

_SECONDS = 2.0
"""A shell waits no longer for a server."""
_RUNS = 200


def complete_run(ctx: Any, incomplete: str) -> list[str]:
    """Runs that left files here, and those that Temporal remembers."""
    home = _home(ctx)
    names = _stored(home)
    with suppress(Exception), redirect_stderr(io.StringIO()):  # a server away completes nothing
        names |= asyncio.run(_remembered(home))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes, and YAML files from here."""
    from relax_infer.config import shipped_recipes

    folder, _, name = incomplete.rpartition("/")
    files: list[str] = []
    with suppress(OSError):
        for path in Path(folder or ".").iterdir():
            if path.name.startswith(name or "") and not path.name.startswith("."):
                shown = f"{folder}/{path.name}" if folder else path.name
                if path.suffix in (".yaml", ".yml"):
                    files.append(shown)
    return [each for each in shipped_recipes() if each.startswith(incomplete)] + sorted(files)


def complete_role(incomplete: str) -> list[str]:
    """Roles whose logs there can be."""
    from relax_infer.cli._log_files import ROLES

    return [role for role in ROLES if role.startswith(incomplete)]


def complete_field(incomplete: str) -> list[str]:
    """Dotted fields of a recipe, for ``--set``."""
    from relax_infer.config import Recipe
    from relax_infer.contracts.faults import dotted

    return [f"{name}=" for name in dotted(Recipe) if name.startswith(incomplete)]


def complete_step(ctx: Any, incomplete: str) -> list[str]:
    """Steps of the run before it that left files here."""
    steps = _home(ctx) / "store" / str(ctx.params.get("run")) / "steps"
    found = [path.name for path in steps.iterdir()] if steps.is_dir() else []
    return sorted((name for name in found if name.startswith(incomplete)), key=_number)


def _home(ctx: Any) -> Path:
    from relax_infer.cli._options import HOME

    return Path(ctx.params.get("home") or HOME)


def _stored(home: Path) -> set[str]:
    store = home / "store"
    return {path.name for path in store.iterdir() if path.is_dir()} if store.is_dir() else set()


async def _remembered(home: Path) -> set[str]:
    from relax_infer.cli._runs import runs_of
    from relax_infer.cli._server import connected, find_target

    names: set[str] = set()
    if find_target(home) is None:
        return names
    async with asyncio.timeout(_SECONDS), connected(home) as server:
        async for run in runs_of(server).list():
            names.add(run.run)
            if len(names) >= _RUNS:
                break
    return names


def _number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (1 << 62, name)
