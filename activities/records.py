"""The small durable record of a step."""

import asyncio

from temporalio import activity
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from activities._recoveries import recoveries_since
from activities._run_files import store_of
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.contracts.run import RecordRequest, StepRecord


@activity.defn
async def write_step_record(request: RecordRequest) -> StagedRef:
    """Phases, times, metrics, the lease's transitions during the step and the recoveries of
    replicas, as one JSON file."""
    transitions = await _transitions(request)
    recoveries = await recoveries_since(activity.client(), request.run.run, request.since)
    record = request.record.model_copy(
        update={"transitions": transitions, "recoveries": recoveries}
    )
    return await asyncio.to_thread(_write, request.run, record)


async def _transitions(request: RecordRequest) -> tuple[dict[str, object], ...]:
    lease = activity.client().get_workflow_handle(f"{request.run.run}.lease")
    try:
        status = await lease.query("state", result_type=LeaseStatus)
    except (RPCError, WorkflowQueryFailedError) as error:
        raise TransientError(f"the lease of {request.run.run} does not answer: {error}") from error
    return tuple(t.model_dump(mode="json") for t in status.transitions if t.at >= request.since)


def _write(run: RunRef, record: StepRecord) -> StagedRef:
    document = record.model_dump(mode="json")
    return store_of(run).write_json(f"steps/{record.step}/record.json", document, replace=True)


ACTIVITIES = (write_step_record,)
