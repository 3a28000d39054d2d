"""Workflows decide by their history alone: neither they nor what they import asks a clock, chance,
a thread or the world. Read from the sources: the SDK's sandbox passes our own modules through."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN_IMPORTS = frozenset(
    [
        "concurrent",
        "fsspec",
        "http",
        "httpx",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "ray",
        "requests",
        "secrets",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
    ]
)
FORBIDDEN_CALLS = frozenset(
    [
        "asyncio.as_completed",
        "asyncio.run",
        "asyncio.to_thread",
        "asyncio.wait",
        "date.today",
        "datetime.now",
        "datetime.today",
        "datetime.utcnow",
        "hash",
        "id",
        "input",
        "open",
        "print",
        "uuid.uuid1",
        "uuid.uuid4",
    ]
)
"""``asyncio.wait`` gives sets, whose order differs from process to process."""
ALLOWED = {
    ("relax_infer/discovery/_fields.py", "hash"): "of a mapping that is a key, never an order",
    ("relax_infer/discovery/aggregate.py", "time"): "of a reader that no workflow makes",
    ("relax_infer/discovery/registry.py", "threading"): "a lock, for registries with threads",
    (
        "relax_infer/discovery/registry.py",
        "uuid.uuid4",
    ): "where no epoch is given; a role gives one",
    ("relax_infer/discovery/resolver.py", "threading"): "of a resolver, which no workflow makes",
    ("workflows/_versions.py", "os"): "read as it is imported: a deployment's, not a run's",
}
"""What is there and decides nothing in a workflow, and why."""


def path_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.exists()), None)


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules that are loaded with this one; what is imported for the type checker is not."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def reached() -> dict[str, ast.Module]:
    """Sources of the workflows and of everything of ours that they import."""
    waiting = [f"workflows.{path.stem}" for path in (ROOT / "workflows").glob("*.py")]
    found: dict[str, ast.Module] = {}
    while waiting:
        path = path_of(waiting.pop())
        name = str(path.relative_to(ROOT)) if path is not None else ""
        if path is None or name in found or not name.startswith(("workflows", "relax_infer")):
            continue
        found[name] = ast.parse(path.read_text())
        waiting += imported(found[name])
    return found


def offences(name: str, tree: ast.Module) -> list[str]:
    told = [
        f"{name} imports {module}"
        for module in imported(tree)
        if (top := module.partition(".")[0]) in FORBIDDEN_IMPORTS and (name, top) not in ALLOWED
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            short = ".".join(call.split(".")[-2:])
            if {call, short} & FORBIDDEN_CALLS and (name, short) not in ALLOWED:
                told.append(f"{name}:{node.lineno} calls {call}")
    return told


SOURCES = reached()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_but_the_history_decides(name: str) -> None:
    assert offences(name, SOURCES[name]) == []


def test_the_rooms_that_workflows_stand_on_are_read() -> None:
    names = set(SOURCES)
    assert {"workflows/gpu_lease.py", "relax_infer/machines/__init__.py"} <= names
    assert any(name.startswith("relax_infer/contracts/") for name in names)
    assert not any("engines/actor" in name for name in names)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import time\n", "imports time"),
        ("from os import environ\n", "imports os"),
        ("import uuid\nuuid.uuid4()\n", "calls uuid.uuid4"),
        ("import datetime\ndatetime.datetime.now()\n", "calls datetime.datetime.now"),
        ("import asyncio\nasync def a():\n    await asyncio.wait([])\n", "calls asyncio.wait"),
        ("open('/x')\n", "calls open"),
    ],
)
def test_what_would_differ_at_a_replay_is_noticed(source: str, told: str) -> None:
    (offence, *_) = offences("workflows/x.py", ast.parse(source))
    assert told in offence


@pytest.mark.parametrize(("name", "what"), sorted(ALLOWED))
def test_an_exception_that_is_not_needed_any_more_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    monkeypatch.delitem(ALLOWED, (name, what))
    assert offences(name, SOURCES[name]) != []


def test_what_asks_the_workflow_itself_is_allowed() -> None:
    source = "from temporalio import workflow\nworkflow.uuid4(); workflow.time(); workflow.now()\n"
    assert offences("workflows/x.py", ast.parse(source)) == []
