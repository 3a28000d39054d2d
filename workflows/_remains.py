"""The end of one added replica, outside of its group: stopped, proved gone, its GPUs given back."""

from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import (
    AddedReplica,
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.scale import OutsiderRecord, PlacementAsk, ScaleFailure
from relax_infer.machines import ReplicaState
from workflows._calls import PROBE_ENGINES, RELEASE_ADDED_REPLICA, STOP_ENGINES, Call
from workflows._failures import PERMANENT, kind_of, text_of

ASK_AGAIN = 4
"""Times that one operation id is asked for, after a worker or a reply was lost."""


async def operate(
    call: Call[EngineOperation, GroupReport],
    doing: str,
    spec: EngineGroupSpec,
    placement: AddedReplica,
    operation_id: str,
    fence: FenceToken,
    weights: WeightsRef | None = None,
) -> ReplicaReport:
    """One operation on one added replica, its gate closed; after a lost worker the same id is asked
    for again."""
    replica = placement.replica
    request = EngineOperation(
        group=spec.alone(placement),
        operation_id=operation_id,
        fence=fence,
        weights=weights,
        open_admission=False,
        replicas=(replica,),
    )
    for left in reversed(range(ASK_AGAIN)):
        try:
            report = await call(request, summary=f"{doing} {spec.engine_id(replica)}")
        except ActivityError as error:
            if not left or kind_of(error) == PERMANENT:
                raise
        else:
            return next(r for r in report.replicas if r.replica == replica)
    raise AssertionError("unreachable")


async def clear(
    record: OutsiderRecord,
    run: RunRef,
    spec: EngineGroupSpec,
    fence: FenceToken,
    operation_id: str,
) -> OutsiderRecord | None:
    """Stop the replica, look a second time, and only then give its GPUs back.

    Returns:
        What is left and why; None when nothing is. What it says was done is not done again.
    """
    if record.placement is not None and not record.stopped:
        report, why = await _stopped(record.placement, spec, fence, operation_id)
        if why is not None:
            told = {"failure": ScaleFailure.STOP_UNCONFIRMED, "why": why, "report": report}
            kept = {name: value for name, value in told.items() if value is not None}
            return record.model_copy(update={"stage": "left", **kept})
        record = record.model_copy(update={"stopped": True, "drained": True, "report": report})
    try:
        await release(run, spec, record.replica)
    except ActivityError as error:
        told = {"failure": ScaleFailure.PLACEMENT_KEPT, "why": text_of(error), "stage": "left"}
        return record.model_copy(update=told)
    return None


async def release(run: RunRef, spec: EngineGroupSpec, replica: int) -> None:
    """Remove the placement group of an added replica that is gone."""
    await RELEASE_ADDED_REPLICA(
        PlacementAsk(run=run, group=spec, replica=replica, timeout=60.0),
        summary=f"give back the GPUs of {spec.engine_id(replica)}",
    )


async def _stopped(
    placement: AddedReplica, spec: EngineGroupSpec, fence: FenceToken, operation_id: str
) -> tuple[ReplicaReport | None, str | None]:
    """Its last report, and why it is not proved gone; None: it is."""
    name = spec.engine_id(placement.replica)
    try:
        report = await operate(STOP_ENGINES, "stop", spec, placement, operation_id, fence)
        if report.state is not ReplicaState.DEAD or report.error is not None:
            return report, report.error or f"it is {report.state}"
        looked = await PROBE_ENGINES(spec.alone(placement), summary=f"look for {name}")
    except ActivityError as error:
        return None, text_of(error)
    (seen,) = looked.replicas
    if seen.state is not ReplicaState.DEAD:
        return seen, seen.error or f"it is {seen.state} after it was stopped"
    return report, None
