"""Workflows that outlive the histories of the one that starts them."""

from pydantic import BaseModel
from temporalio import workflow
from temporalio.common import TypedSearchAttributes
from temporalio.exceptions import WorkflowAlreadyStartedError

ENDING, ENDINGS = 1.0, 30
"""Seconds between two tries to start a workflow while the one before it ends, and tries."""


async def begin_lasting(
    kind: str,
    start: BaseModel,
    *,
    id: str,
    search_attributes: TypedSearchAttributes,
    summary: str,
    patient: bool = False,
) -> None:
    """Start a child with parent-close policy ABANDON.

    Args:
        patient: an earlier one of this id may take a moment to end after it has said that nothing
            of it is left.

    Raises:
        WorkflowAlreadyStartedError: one of this id is there, and stays.
    """
    for tried in range(ENDINGS + 1):
        try:
            await workflow.start_child_workflow(
                kind,
                start,
                id=id,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                search_attributes=search_attributes,
                static_summary=summary,
            )
        except WorkflowAlreadyStartedError:
            if not patient or tried == ENDINGS:
                raise
            await workflow.sleep(ENDING)
        else:
            return
