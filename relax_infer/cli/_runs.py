"""Runs as a client sees them: start, look, ask. By type name and id only."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
)
from temporalio.common import (
    SearchAttributeKey,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import FailureError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._errors import CommandError
from relax_infer.cli._glance import Glance
from relax_infer.cli._pending import Pending, pending_of
from relax_infer.cli._pollers import QUEUE, Notice, Pollers, pollers_of
from relax_infer.cli._server import Server, connected
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import RunInput, RunStatus, StepStatus
from relax_infer.machines import RUN, RunState

WORKFLOW = "TrainingRun"
_STATE = SearchAttributeKey.for_keyword("RelaxState")
_WEIGHTS = SearchAttributeKey.for_int("RelaxWeightVersion")
_REWARD = SearchAttributeKey.for_float("RelaxReward")
_QUERY = timedelta(seconds=10)
_QUERY_OF_ENDED = timedelta(seconds=3)
"""A run that is over can do without the answer."""
_AGAIN = 0.5
"""Seconds before a worker that did not answer is asked again."""
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

M = TypeVar("M")


@dataclass(frozen=True)
class Listed:
    """A line of the list of runs."""

    run: str
    open: bool
    state: str
    started: datetime
    weights: int | None = None
    """Newest weight version in the engines."""
    reward: float | None = None
    """Of the last batch."""


class NobodyAnswersError(CommandError):
    """The run is there; no worker answers for it."""


class Runs:
    """The runs of one Temporal namespace.

    Args:
        home: of the local stack that the server belongs to; None: of any other.
    """

    def __init__(self, client: Client, address: str, home: Path | None = None) -> None:
        self._client, self._address, self._home = client, address, home

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

    async def glance(self, run: str, *, patience: float = 0.0) -> Glance:
        """The run, its step at work and its lease.

        Args:
            patience: seconds for which a worker that does not answer is asked again.

        Raises:
            CommandError: there is no such run.
            NobodyAnswersError: it goes on and no worker answers.
        """
        status, told = await self.status(run, patience=patience)
        if status.state in RUN.terminal:
            return Glance(status)
        step, lease = await asyncio.gather(
            self.query(f"{run}.step-{at_work(status)}", "status", StepStatus),
            self.query(status.lease, "state", LeaseStatus),
        )
        return Glance(status, step, lease, told)

    async def status(self, run: str, *, patience: float = 0.0) -> tuple[RunStatus, str | None]:
        """The run alone, and what its activities at work tell; errors as of :meth:`glance`."""
        described = await self._describe(run)
        if described is None:
            raise CommandError(
                f"There is no run {run} on {self._address}.",
                cure="`relax-infer status` lists those there are.",
            )
        handle = self._client.get_workflow_handle(run, run_id=described.run_id)
        if described.status is not _RUNNING:
            return await self._ended(handle, described), None
        told = pending_of(described).told
        end = time.monotonic() + patience
        while (status := await self._query(handle, "status", RunStatus)) is None:
            if time.monotonic() >= end:
                raise NobodyAnswersError(
                    f"Run {run} is there; no worker answers, or it is busy.",
                    cure="Try again in a minute; if there is none, `relax-infer up` or"
                    " `relax-infer worker` starts one. The run then goes on.",
                )
            await asyncio.sleep(_AGAIN)
        return status, told

    async def list(self, *, only_open: bool = False) -> AsyncIterator[Listed]:
        """Newest first."""
        query = f"WorkflowType = '{WORKFLOW}'"
        if only_open:
            query += " AND ExecutionStatus = 'Running'"
        async for found in self._client.list_workflows(query):
            state = found.typed_search_attributes.get(_STATE)
            is_open = found.status is _RUNNING
            ended = found.status.name if found.status else "?"
            shown = state if state and (is_open or ended == "COMPLETED") else ended
            known = found.typed_search_attributes
            yield Listed(
                run=found.id,
                open=is_open,
                state=shown,
                started=found.start_time,
                weights=known.get(_WEIGHTS),
                reward=known.get(_REWARD),
            )

    async def pollers(self) -> Pollers:
        """Whether a worker asks for the work of runs."""
        return await pollers_of(self._client, self._home)

    def notice(self) -> Notice:
        """For as long as something is waited for that a worker has to answer."""
        return Notice(self._client, self._home)

    # --- pieces

    @property
    def client(self) -> Client:
        return self._client

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
            error = words_of(failure.cause)
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

    async def told(self, workflow: str) -> str | None:
        """What the activities at work of any workflow tell; None if nothing."""
        pending = await self.pending(workflow)
        return pending.told if pending is not None else None

    async def pending(self, workflow: str) -> Pending | None:
        """What a workflow waits for; None if there is none of that id."""
        try:
            handle = self._client.get_workflow_handle(workflow)
            return pending_of(await handle.describe(rpc_timeout=_QUERY))
        except RPCError:
            heed_interrupt()
            return None

    async def query(self, workflow: str | None, query: str, kind: type[M]) -> M | None:
        """What a workflow answers; None if there is none of that id, or nobody answers for it."""
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


def runs_of(server: Server) -> Runs:
    return Runs(server.client, server.target.address, server.target.home)


def at_work(status: RunStatus) -> int:
    """Number of the step that follows the last finished one."""
    return status.progress[-1].step + 1 if status.progress else 0


def words_of(cause: BaseException) -> str:
    return (cause.message if isinstance(cause, FailureError) else str(cause)).rstrip(".")


def heed_interrupt() -> None:
    """Ctrl-C cancels the task; the client may show it as an error of the call that it cut short,
    and whoever takes that for an answer would go on as if nothing had been asked."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def open_runs(home: Path) -> list[str]:
    """Ids of the runs that have not ended, on the server that ``home`` or the environment names."""
    async with connected(home) as server:
        runs = runs_of(server)
        return [each.run async for each in runs.list(only_open=True)]
