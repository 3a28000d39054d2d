"""The small durable record of a step."""

import asyncio

from temporalio import activity
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from activities._recoveries import recoveries_since
from activities._run_files import recipe_of, store_of
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.contracts.run import GaveUp, RecordRequest, StepRecord
from relax_infer.machines import StepPhase
from relax_infer.samples import layout


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
    store, name = store_of(run), layout.record(record.step)
    if store.exists(name):
        record = after(StepRecord.model_validate(store.read_json(name)), record)
    staged = store.write_json(name, record.model_dump(mode="json"), replace=True)
    keep = recipe_of(run).staging.keep_steps
    if keep is not None and record.outcome is StepPhase.DONE:
        store.forget_samples(record.step - keep)
    return staged


def after(earlier: StepRecord, record: StepRecord) -> StepRecord:
    """The record of an attempt, with what is known of those before it."""
    phases = earlier.result.phases
    if phases == record.result.phases:
        return record.model_copy(update={"earlier": earlier.earlier})  # the same one, written again
    known = {str(sorted(t.items())): t for t in (*earlier.transitions, *record.transitions)}
    recoveries = {t.workflow: t for t in (*earlier.recoveries, *record.recoveries)}
    gave_up = earlier.earlier
    if earlier.error is not None and phases:
        last = phases[-1]
        gave_up = (
            *gave_up,
            GaveUp(
                error=earlier.error,
                began=phases[0].started,
                ended=last.started + last.seconds,
            ),
        )
    return record.model_copy(
        update={
            "earlier": gave_up,
            "retries": (*earlier.retries, *record.retries),
            "transitions": tuple(known.values()),
            "recoveries": tuple(recoveries.values()),
        }
    )


ACTIVITIES = (write_step_record,)
