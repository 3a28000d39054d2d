"""Runs that began on earlier code go on: their histories replay, whatever the hash seed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = {path.name.split(".json")[0] for path in (ROOT / "tests" / "histories").glob("*.json.gz")}


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
    assert int(done.stdout) == len(KEPT)
    assert {"run", "step-0", "step-1", "lease", "rollout", "rollout.policy", "weights-1"} <= KEPT
    assert any("recovery" in name for name in KEPT)
