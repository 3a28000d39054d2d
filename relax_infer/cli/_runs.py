"""Runs as a client sees them: start, look, ask. By type name and id only."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._errors import CommandError, UnansweredError
from relax_infer.cli._glance import Glance
from relax_infer.contracts.base import Message
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import ResolveRun, RunInput, RunStatus, StepStatus
from relax_infer.machines import RUN, RunState

WORKFLOW, QUEUE = "TrainingRun", "relax"
_QUERY = timedelta(seconds=10)
_QUERY_OF_ENDED = timedelta(seconds=3)
"""A run that is over can do without the answer."""
_UPDATE = 60.0
_RUNNING = WorkflowExecutionStatus.RUNNING
_SILENT = (
    RPCStatusCode.ABORTED,
    RPCStatusCode.CANCELLED,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.FAILED_PRECONDITION,
    RPCStatusCode.INTERNAL,
    RPCStatusCode.RESOURCE_EXHAUSTED,
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.UNKNOWN,
)
"""What Temporal answers while no worker is there for a query, or it is itself on its way."""

M = TypeVar("M", bound=Message)
Request = Literal["pause", "resume", "stop"]


@dataclass(frozen=True)
class Listed:
    """A line of the list of runs."""

    run: str
    open: bool
    state: str
    started: datetime


class NobodyAnswersError(CommandError):
    """The run is there; no worker answers for it."""


class Runs:
    """The runs of one Temporal namespace."""

    def __init__(self, client: Client, address: str) -> None:
        self._client, self._address = client, address

    async def start(self, run: str, start: RunInput) -> bool:
        """Start a run; False if the id was used before, whether that run is over or not."""
        try:
            await self._client.start_workflow(
                WORKFLOW,
                start,
                id=run,
                task_queue=QUEUE,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                static_summary=f"run {run}",
            )
        except WorkflowAlreadyStartedError:
            return False
        return True

    async def is_open(self, run: str) -> bool | None:
        """Whether the run goes on; None if there is none of that id.

        Raises:
            CommandError: the id belongs to another kind of workflow.
        """
        described = await self._describe(run)
        return None if described is None else described.status is _RUNNING

    async def glance(self, run: str) -> Glance:
        """The run, its step at work and its lease.

        Raises:
            CommandError: there is no such run.
            NobodyAnswersError: it goes on and no worker answers.
        """
        described = await self._describe(run)
        if described is None:
            raise CommandError(
                f"There is no run {run} on {self._address}.",
                cure="`relax-infer status` lists those there are.",
            )
        handle = self._client.get_workflow_handle(run, run_id=described.run_id)
        if described.status is not _RUNNING:
            return Glance(await self._ended(handle, described))
        status = await self._query(handle, "status", RunStatus)
        if status is None:
            raise NobodyAnswersError(
                f"Run {run} is there, and no worker answers for it.",
                cure="`relax-infer up` or `relax-infer worker` starts one; the run then goes on.",
            )
        step, lease = await asyncio.gather(
            self._query_of(f"{run}.step-{_at_work(status)}", "status", StepStatus),
            self._query_of(status.lease, "state", LeaseStatus),
        )
        return Glance(status, step, lease)

    async def ask(self, run: str, request: Request) -> RunStatus:
        """Pause, resume or stop it.

        Raises:
            CommandError: it is not legal now.
            UnansweredError: nobody said what became of it.
        """
        return await self._update(run, request)

    async def resolve(self, run: str, resolution: ResolveRun) -> RunStatus:
        """A person's answer to a BLOCKED run; errors as of :meth:`ask`."""
        return await self._update(run, "resolve", resolution)

    async def list(self, *, only_open: bool = False) -> AsyncIterator[Listed]:
        """Newest first."""
        query = f"WorkflowType = '{WORKFLOW}'"
        if only_open:
            query += " AND ExecutionStatus = 'Running'"
        async for found in self._client.list_workflows(query):
            state = found.search_attributes.get("RelaxState", [])
            is_open = found.status is _RUNNING
            ended = found.status.name if found.status else "?"
            shown = str(state[0]) if state and (is_open or ended == "COMPLETED") else ended
            yield Listed(found.id, is_open, shown, found.start_time)

    # --- pieces

    async def _describe(self, run: str) -> WorkflowExecutionDescription | None:
        try:
            described = await self._client.get_workflow_handle(run).describe(rpc_timeout=_QUERY)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            if error.status in _SILENT:
                raise NobodyAnswersError(
                    f"Temporal on {self._address} does not answer: {error.message}.",
                    cure="`relax-infer up` starts a local one again; the run then goes on.",
                ) from error
            raise
        if described.workflow_type != WORKFLOW:
            raise CommandError(
                f"{run} is no run: it is a {described.workflow_type}.",
                cure="Name the run that it belongs to, or choose another id.",
            )
        return described

    async def _ended(
        self, handle: WorkflowHandle[Any, Any], described: WorkflowExecutionDescription
    ) -> RunStatus:
        """How a closed run ended; the result of one that is done needs no worker."""
        typed = self._client.get_workflow_handle(
            described.id, run_id=described.run_id, result_type=RunStatus
        )
        try:
            return await typed.result(rpc_timeout=_QUERY)
        except WorkflowFailureError as failure:
            error = _words(failure.cause)
        status = await self._query(handle, "status", RunStatus, _QUERY_OF_ENDED)
        if status is not None and status.state in RUN.terminal:
            return status
        how = described.status.name if described.status else "closed"
        if how != "FAILED":
            error = f"the run was ended from outside ({how}): engines may still hold their GPUs"
        known = status or RunStatus(
            run=described.id, state=RunState.FAILED, doing="", step=0, target=0
        )
        return known.model_copy(
            update={"state": RunState.FAILED, "doing": "has failed", "error": error}
        )

    async def _query_of(self, workflow: str | None, query: str, kind: type[M]) -> M | None:
        if workflow is None:
            return None
        return await self._query(self._client.get_workflow_handle(workflow), query, kind)

    async def _query(
        self,
        handle: WorkflowHandle[Any, Any],
        query: str,
        kind: type[M],
        timeout: timedelta = _QUERY,
    ) -> M | None:
        """None if there is no such workflow, or nobody to answer for it."""
        try:
            return await handle.query(query, result_type=kind, rpc_timeout=timeout)
        except WorkflowQueryFailedError:
            return None
        except RPCError as error:
            heed_interrupt()
            if error.status is RPCStatusCode.NOT_FOUND or error.status in _SILENT:
                return None
            raise

    async def _update(self, run: str, update: str, *arguments: Message) -> RunStatus:
        before = (await self.glance(run)).run
        if before.state in RUN.terminal:
            raise CommandError(f"Run {run} is over ({before.state}): {update} comes too late.")
        handle = self._client.get_workflow_handle(run)
        try:
            async with asyncio.timeout(_UPDATE):
                return await handle.execute_update(
                    update, args=list(arguments), result_type=RunStatus
                )
        except WorkflowUpdateFailedError as error:
            raise CommandError(f"Run {run}: {_words(error.cause)}.") from error
        except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            raise UnansweredError(
                f"Run {run} did not answer `{update}` within {_UPDATE:.0f} s; it may yet do it.",
                cure=f"`relax-infer status {run}` says where it stands.",
            ) from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                raise CommandError(f"Run {run} has just ended: {update} came too late.") from error
            raise UnansweredError(
                f"Run {run}, `{update}`: Temporal says {error.message}.",
                cure=f"`relax-infer status {run}` says where the run stands.",
            ) from error


async def polled(client: Client) -> bool:
    """Whether any worker asked for workflow tasks in the last minutes."""
    described = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=QUEUE),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        ),
        timeout=_QUERY,
    )
    return len(described.pollers) > 0


def _at_work(status: RunStatus) -> int:
    """Number of the step that follows the last finished one."""
    return status.progress[-1].step + 1 if status.progress else 0


def _words(cause: BaseException) -> str:
    return (cause.message if isinstance(cause, FailureError) else str(cause)).rstrip(".")


def heed_interrupt() -> None:
    """Ctrl-C cancels the task; the client may show it as an error of the call that it cut short,
    and whoever takes that for an answer would go on as if nothing had been asked."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
