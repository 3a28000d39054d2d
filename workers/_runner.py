"""What every process that runs or replays workflows must agree on."""

from pydantic import ValidationError
from temporalio.worker import UnsandboxedWorkflowRunner, WorkflowRunner

FAILS_WORKFLOW = (ValidationError,)
"""Input that cannot be read fails the workflow at once, instead of retrying for ever."""


def workflow_runner() -> WorkflowRunner:
    """No sandbox: it would pass our own modules through unrestricted, and costs a third of a
    workflow task. That workflows decide nothing by a clock, chance or the world is checked from
    their source and by replay (``tests/workflows/test_deterministic.py``, ``test_replay.py``)."""
    return UnsandboxedWorkflowRunner()
