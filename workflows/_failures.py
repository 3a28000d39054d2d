"""What kind of failure a workflow met, and errors that it raises itself."""

from collections.abc import Awaitable

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    TimeoutError,
)

from relax_infer.machines import IllegalTransition

TRANSIENT, PERMANENT, UNCONFIRMED = "Transient", "Permanent", "Unconfirmed"


def fail(kind: str, message: str) -> ApplicationError:
    """An error of ``kind`` that ends the operation (or the workflow) that raises it."""
    return ApplicationError(message, type=kind, non_retryable=True)


def kind_of(error: BaseException) -> str:
    """Transient, Permanent or Unconfirmed.

    An activity that timed out or whose worker died may or may not have done its work: Unconfirmed.
    """
    cause = root(error)
    if isinstance(cause, ApplicationError):
        return cause.type if cause.type in (TRANSIENT, UNCONFIRMED) else PERMANENT
    if isinstance(cause, IllegalTransition):
        return PERMANENT
    return UNCONFIRMED


def text_of(error: BaseException) -> str:
    """The innermost message, for people."""
    cause = root(error)
    if isinstance(cause, TimeoutError):
        return f"no answer in time ({cause.message})"
    if isinstance(cause, FailureError):
        return cause.message
    return str(cause) or type(cause).__name__


def root(error: BaseException) -> BaseException:
    """The failure below the wrappers that Temporal puts around it."""
    while isinstance(error, (ActivityError, ChildWorkflowError)) and error.cause is not None:
        error = error.cause
    return error


async def in_peace(work: Awaitable[object]) -> None:
    """Part of giving up: a further failure is logged and must not hide the first."""
    try:
        await work
    except FailureError as error:
        workflow.logger.error("while giving up: %s", text_of(error))
