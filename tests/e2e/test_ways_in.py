"""A way in that is not walked by the runs of test_loop: they are started by the documented Python
program and by the documented command of Temporal's."""

import subprocess
import uuid

import pytest

from tests.e2e.looking import start_as_typed
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="session"),
]


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
