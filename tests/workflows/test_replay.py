"""Runs that began on earlier code go on: their histories replay, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seed", "how"), [("1", ()), ("2", ()), ("1", ("traced",))])
def test_kept_histories_replay_on_todays_workflows(seed: str, how: tuple[str, ...]):
    done = subprocess.run(
        [sys.executable, "-m", "tests.workflows.histories", "replay", *how],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 8
