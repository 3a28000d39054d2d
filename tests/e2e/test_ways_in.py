"""The documented ways to start a run work as they are written.

That by Temporal's command line is walked by the run of test_loop that outlives its servers.
"""

import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from relax_infer.contracts.run import RunStatus
from relax_infer.machines import RunState
from tests.e2e.looking import start_as_typed
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="session"),
]
DOCS = Path(__file__).parents[2] / "docs"


async def test_the_python_program_of_the_documentation_runs(stack: Stack, tmp_path: Path):
    program, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.DOTALL)
    run = f"run-{uuid.uuid4().hex[:8]}"
    assert '"run-1"' in program
    assert '"127.0.0.1:7233"' in program
    program = program.replace("run-1", run).replace("127.0.0.1:7233", stack.temporal_address)
    (tmp_path / "client.py").write_text(program)
    done = subprocess.run(
        [sys.executable, tmp_path / "client.py"],
        env=stack.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    # The Temporal SDK can crash an interpreter that is about to exit; the answer is out by then.
    assert done.returncode in (0, -signal.SIGSEGV, -signal.SIGABRT), done.stderr[-2000:]
    status = RunStatus.model_validate_json(done.stdout)
    assert status.state is RunState.DONE
    assert status.step == 1


async def test_input_that_cannot_be_read_fails_at_once(stack: Stack):
    run = f"run-{uuid.uuid4().hex[:8]}"
    start_as_typed(stack, run, {"recipe": "quickstart", "stepz": 1})
    shown = subprocess.run(
        ["temporal", "workflow", "result", "--workflow-id", run],
        env=stack.environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode != 0
    assert "stepz" in shown.stdout + shown.stderr
