"""The tree's own rules: who may import whom, what stays light, what every activity must have."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_infer.contracts.policies import POLICIES

CHECKOUT = Path(__file__).parents[1]
LIBRARY = CHECKOUT / "relax_infer"
ROOMS = sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
HEAVY = (
    *("torch", "ray", "sglang", "transformers", "megatron", "tensordict", "transfer_queue"),
    *("pyarrow", "numpy", "uvicorn", "temporalio"),
)
_LOADED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def imported_by(path: Path) -> set[str]:
    """Top-level names of every import in a file, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_imports_point_one_way():
    linter = Path(sys.executable).parent / "lint-imports"
    checked = subprocess.run(
        (linter, "--no-cache"),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_of_the_library_only_the_command_line_and_the_codec_know_temporal():
    assert [
        str(path.relative_to(CHECKOUT))
        for path in LIBRARY.rglob("*.py")
        if "temporalio" in imported_by(path)
        and LIBRARY / "cli" not in path.parents
        and path != LIBRARY / "security" / "codec.py"
    ] == []


def test_the_command_line_reaches_the_application_by_name_only():
    application = {"workflows", "activities", "workers"}
    assert [
        str(path.relative_to(CHECKOUT))
        for path in (LIBRARY / "cli").rglob("*.py")
        if imported_by(path) & application
    ] == []


@pytest.mark.parametrize("room", ["relax_infer", *(f"relax_infer.{room}" for room in ROOMS)])
def test_importing_a_room_loads_nothing_heavy(room: str):
    loaded = subprocess.run(
        (sys.executable, "-c", _LOADED, room, *HEAVY),
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(loaded.stdout) == []


def test_every_activity_has_a_policy_and_every_policy_an_activity():
    from activities.registry import ACTIVITIES

    assert sorted(activity.__name__ for activity in ACTIVITIES) == sorted(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_an_activity_is_missed_long_before_it_times_out(name: str):
    policy = POLICIES[name]
    assert 0 < policy.heartbeat <= policy.start_to_close / 2
