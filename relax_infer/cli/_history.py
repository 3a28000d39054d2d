"""What a step's workflow history says: phases, activities, what it asked others. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.converter import PayloadConverter

from relax_infer.contracts.run import PhaseTime
from relax_infer.machines import STEP, StepPhase
from relax_infer.security.codec import opened

_STATE = "RelaxState"
"""Search attribute that a step sets to its phase."""
_E = EventType


@dataclass
class Done:
    """One activity or child workflow of the history."""

    name: str
    summary: str
    at: float
    """Unix seconds when it was asked for."""
    ended: float | None = None
    outcome: str = "at work"
    """``at work``, ``done``, or how it failed."""
    words: str = ""
    """Of the failure."""


@dataclass
class Told:
    """A step's history in a form that can be read."""

    began: float = 0.0
    ended: float | None = None
    entered: list[tuple[StepPhase, float]] = field(default_factory=list[tuple[StepPhase, float]])
    """Each phase with the time at which it began."""
    activities: list[Done] = field(default_factory=list[Done])
    children: list[Done] = field(default_factory=list[Done])
    asked: dict[str, tuple[str, str, float]] = field(
        default_factory=dict[str, tuple[str, str, float]]
    )
    """Operations that nobody has answered yet: id → whom, what, when."""
    error: str | None = None
    closed: str | None = None
    """How the workflow ended, if not by itself: TERMINATED, TIMED_OUT, CANCELED."""

    def phases(self, now: float) -> tuple[PhaseTime, ...]:
        """Those that are over and the one at work, with its time so far."""
        ends = [*(at for _, at in self.entered[1:]), self.ended or now]
        return tuple(
            PhaseTime(phase=phase, started=at, seconds=max(end - at, 0.0))
            for (phase, at), end in zip(self.entered, ends, strict=True)
            if phase not in STEP.terminal
        )


def read(events: Iterable[Any]) -> Told:
    """From the events of a TrainingStep, oldest first."""
    told = Told()
    scheduled: dict[int, Done] = {}
    for event in events:
        at = event.event_time.ToDatetime(UTC).timestamp()
        _read_one(told, scheduled, event, at)
    if not told.entered and told.began:
        told.entered.append((STEP.initial, told.began))
    return told


def _read_one(told: Told, scheduled: dict[int, Done], event: Any, at: float) -> None:
    match event.event_type:
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_STARTED:
            told.began = at
        case _E.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES:
            fields = event.upsert_workflow_search_attributes_event_attributes.search_attributes
            _enter(told, fields.indexed_fields, at)
        case _E.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            what = event.activity_task_scheduled_event_attributes
            summary = payload_value(event.user_metadata.summary) or what.activity_type.name
            scheduled[event.event_id] = Done(what.activity_type.name, str(summary), at)
            told.activities.append(scheduled[event.event_id])
        case _E.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            _end(scheduled, event.activity_task_completed_event_attributes, at, "done")
        case _E.EVENT_TYPE_ACTIVITY_TASK_FAILED:
            _end(scheduled, event.activity_task_failed_event_attributes, at, "failed")
        case _E.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT:
            _end(scheduled, event.activity_task_timed_out_event_attributes, at, "timed out")
        case _E.EVENT_TYPE_ACTIVITY_TASK_CANCELED:
            scheduled[event.activity_task_canceled_event_attributes.scheduled_event_id].ended = at
        case _E.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED:
            child = event.start_child_workflow_execution_initiated_event_attributes
            scheduled[event.event_id] = Done(child.workflow_type.name, child.workflow_id, at)
            told.children.append(scheduled[event.event_id])
        case _E.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_COMPLETED:
            ended = event.child_workflow_execution_completed_event_attributes
            _end_child(scheduled, ended, at, "done")
        case _E.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_FAILED:
            ended = event.child_workflow_execution_failed_event_attributes
            _end_child(scheduled, ended, at, "failed", innermost(ended.failure))
        case _E.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED:
            signal = event.signal_external_workflow_execution_initiated_event_attributes
            ask = payload_value(*signal.input.payloads)
            if signal.signal_name == "ask" and isinstance(ask, dict):
                whom = signal.workflow_execution.workflow_id
                asked = (whom, str(ask.get("method")), at)
                told.asked.setdefault(str(ask.get("operation_id")), asked)  # it may be asked again
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED:
            signal = event.workflow_execution_signaled_event_attributes
            answer = payload_value(*signal.input.payloads)
            if signal.signal_name == "answer" and isinstance(answer, dict):
                told.asked.pop(str(answer.get("operation_id")), None)
        case _:
            _read_ending(told, event, at)


def _read_ending(told: Told, event: Any, at: float) -> None:
    match event.event_type:
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED:
            told.ended = at
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED:
            told.ended = at
            told.error = innermost(event.workflow_execution_failed_event_attributes.failure)
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED:
            told.ended, told.closed = at, "TERMINATED"
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED:
            told.ended, told.closed = at, "CANCELED"
        case _E.EVENT_TYPE_WORKFLOW_EXECUTION_TIMED_OUT:
            told.ended, told.closed = at, "TIMED_OUT"
        case _:
            pass


def _enter(told: Told, fields: Any, at: float) -> None:
    state = payload_value(fields[_STATE]) if _STATE in fields else None
    if state in set(StepPhase) and (not told.entered or told.entered[-1][0] != state):
        told.entered.append((StepPhase(str(state)), at))


def _end(scheduled: dict[int, Done], attributes: Any, at: float, outcome: str) -> None:
    done = scheduled[attributes.scheduled_event_id]
    done.ended, done.outcome = at, outcome
    if outcome != "done":
        done.words = innermost(attributes.failure)


def _end_child(
    scheduled: dict[int, Done], attributes: Any, at: float, outcome: str, words: str = ""
) -> None:
    done = scheduled[attributes.initiated_event_id]
    done.ended, done.outcome, done.words = at, outcome, words


def innermost(failure: Any) -> str:
    """The words at the root of a failure."""
    while failure.HasField("cause"):
        failure = failure.cause
    if failure.HasField("encoded_attributes"):
        told = payload_value(failure.encoded_attributes)
        return str(told["message"]) if isinstance(told, dict) else str(failure.message)
    return str(failure.message)


def payload_value(*payloads: Any) -> object:
    """What a payload holds; None for none, several, or one that cannot be read here (encrypted, or
    of other makers)."""
    if len(payloads) != 1 or not payloads[0].data:
        return None
    values: Sequence[object]
    try:
        values = PayloadConverter.default.from_payloads([opened(each) for each in payloads])
    except Exception:  # sealed under a key that is not known here, or of other makers
        return None
    return values[0]


def clock(at: float) -> str:
    """Time of day, here."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")
