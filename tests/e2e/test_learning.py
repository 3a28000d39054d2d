"""Forty steps of the quickstart: what must be learned, and what must not.

Not in CI: ``make slow`` runs it, several minutes a run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from tests.e2e.looking import RunFiles, finish, start
from tests.stack.conftest import marked_home
from workers.local import Stack, down

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]

ROOT = Path(__file__).parents[2]
MODES: dict[str, dict[str, Any]] = {
    "genrm only": {"distillation": None},
    "teacher only": {"reward.source": "none"},
}
PLACEBO = {"reward.source": "random", "distillation": None}


def accuracies(files: RunFiles, *steps: int) -> list[float]:
    evaluations = [files.record(step).result.evaluation for step in steps]
    return [evaluation.accuracy for evaluation in evaluations if evaluation is not None]


@pytest.fixture
def fresh_home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="relax-demo-"))
    yield home
    down(home)
    shutil.rmtree(home)


@pytest.mark.parametrize("seed", [0, 3, 7])
async def test_the_demo_teaches_the_policy_to_sort(fresh_home: Path, tmp_path: Path, seed: int):
    """The command of `make demo`, as it is written but for where its files go, with models that it
    makes itself."""
    (line,) = re.findall(r"^demo: install\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    report = tmp_path / "relax-report.html"
    for written, meant in (
        ("$(BIN)", str(Path(sys.executable).parent)),
        ("$(STEPS)", "40"),
        ("relax-report.html", str(report)),
    ):
        assert written in line
        line = line.replace(written, meant)
    command = [*shlex.split(line), "--home", str(fresh_home), "--set", f"seed={seed}"]
    subprocess.run(command, check=True, env={**os.environ, "COLUMNS": "200"})
    assert not (left := marked_home(fresh_home)), f"the demo left {left}"
    assert "<svg" in report.read_text()
    (run,) = (fresh_home / "store").iterdir()
    first, last = accuracies(RunFiles(fresh_home, run.name), 0, 40)
    print(f"seed {seed}: {first:.3f} to {last:.3f}")
    assert 0.25 <= first <= 0.45
    assert last >= 0.90


@pytest.mark.parametrize("mode", MODES)
async def test_forty_steps_teach_the_policy_to_sort(stack: Stack, client: Client, mode: str):
    first, last = await forty(stack, client, MODES[mode], 0, 40)
    print(f"{mode}: {first:.3f} to {last:.3f}")
    assert 0.25 <= first <= 0.45
    assert last >= 0.90


async def test_a_random_reward_teaches_nothing(stack: Stack, client: Client):
    first, *others = await forty(stack, client, PLACEBO, 0, 10, 20, 30, 40)
    print(f"random reward: {first:.3f}, then {others}")
    assert 0.25 <= first <= 0.45
    assert len(others) == 4
    assert max(others) <= first + 0.1


async def forty(
    stack: Stack, client: Client, overrides: dict[str, Any], *steps: int
) -> list[float]:
    """Accuracies after some of forty steps."""
    every = {"evaluation.every": steps[1]}
    handle = await start(client, steps=40, overrides={**every, **overrides})
    await finish(handle, seconds=3000)
    return accuracies(RunFiles(stack.home, handle.id), *steps)
