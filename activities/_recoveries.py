"""How the recoveries of a run's replicas went, from their workflow histories."""

from collections.abc import AsyncIterable
from datetime import UTC, datetime
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.converter import DataConverter
from temporalio.service import RPCError

from relax_infer.contracts.recovery import RecoveryInput, RecoveryResult, RecoveryTrace
from relax_infer.machines import RecoveryState

SLACK = 60.0
"""Seconds that a recovery may have ended before ``since``: what Temporal lists comes late, and one
that the step before has missed is found now."""
_STATE = "RelaxState"
_E = EventType


async def recoveries_since(client: Client, run: str, since: float) -> tuple[RecoveryTrace, ...]:
    """Recoveries that were at work after ``since`` (Unix seconds), oldest first. None where they
    cannot be listed: a step is not lost over what is told of it."""
    when = datetime.fromtimestamp(since - SLACK, UTC).isoformat()
    query = (
        f"RelaxRun = '{run}' AND WorkflowType = 'ReplicaRecovery' AND"
        f" (ExecutionStatus = 'Running' OR CloseTime >= '{when}')"
    )
    traces: list[RecoveryTrace] = []
    try:
        async for found in client.list_workflows(query):
            events = client.get_workflow_handle(
                found.id, run_id=found.run_id
            ).fetch_history_events()
            trace = await read_trace(found.id, events, client.data_converter)
            if trace is not None:
                traces.append(trace)
    except RPCError as error:
        activity.logger.warning("recoveries of %s cannot be listed: %s", run, error)
    return tuple(sorted(traces, key=lambda trace: trace.states[0][1]))


async def read_trace(
    workflow: str, events: AsyncIterable[Any], converter: DataConverter
) -> RecoveryTrace | None:
    """From the events of a ReplicaRecovery; None before its first state."""
    start: RecoveryInput | None = None
    result: RecoveryResult | None = None
    states: list[tuple[RecoveryState, float]] = []
    ended: float | None = None
    async for event in events:
        at = event.event_time.ToDatetime(UTC).timestamp()
        match event.event_type:
            case _E.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
                given = event.workflow_execution_started_event_attributes.input.payloads
                [start] = await converter.decode(given, [RecoveryInput])
            case _E.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES:
                fields = event.upsert_workflow_search_attributes_event_attributes.search_attributes
                if _STATE in fields.indexed_fields:
                    payload = fields.indexed_fields[_STATE]
                    [name] = converter.payload_converter.from_payloads([payload])
                    states.append((RecoveryState(name), at))
            case _E.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED:
                given = event.workflow_execution_completed_event_attributes.result.payloads
                [result] = await converter.decode(given, [RecoveryResult])
                ended = at
            case (
                _E.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED
                | _E.EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED
                | _E.EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED
            ):
                ended = at
            case _:
                pass
    if start is None or not states:
        return None
    return RecoveryTrace(
        workflow=workflow,
        engine_id=start.group.engine_id(start.replica),
        role=start.group.role,
        cause=start.cause,
        states=tuple(states),
        ended=ended,
        why=result.why if result else None,
        resolved_by=result.resolved_by if result else None,
    )
