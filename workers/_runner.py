"""What every process that runs or replays workflows must agree on."""

from pydantic import ValidationError
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

PASSED_THROUGH = ("relax_infer", "workflows", "pydantic", "pydantic_core", "annotated_types")

FAILS_WORKFLOW = (ValidationError,)
"""Input that cannot be read fails the workflow at once, instead of retrying for ever."""


def workflow_runner() -> SandboxedWorkflowRunner:
    """The sandbox, with our own pure modules and pydantic imported once for all workflows."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
    )
