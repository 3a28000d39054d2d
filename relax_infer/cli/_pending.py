"""What a workflow waits for, as Temporal itself knows it: no worker has to answer."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.client import WorkflowExecutionDescription

from relax_infer.cli._history import innermost, payload_value


@dataclass(frozen=True)
class Activity:
    """An activity at work, or waiting for its next attempt."""

    name: str
    attempt: int
    started: datetime | None
    """None: no worker has taken it."""
    heard: datetime | None
    """Its last heartbeat."""
    told: str | None
    """What it last told of itself."""
    failure: str | None
    """Why its attempt before failed."""
    worker: str


@dataclass(frozen=True)
class Pending:
    """Of one workflow."""

    activities: tuple[Activity, ...] = ()
    children: tuple[str, ...] = ()
    """Workflow ids."""

    @property
    def told(self) -> str | None:
        """What the activities at work tell."""
        return "; ".join(each.told for each in self.activities if each.told) or None


def pending_of(described: WorkflowExecutionDescription) -> Pending:
    """Read it from what a describe answered."""
    raw = described.raw_description
    return Pending(
        activities=tuple(_activity(each) for each in raw.pending_activities),
        children=tuple(each.workflow_id for each in raw.pending_children),
    )


def _activity(raw: Any) -> Activity:
    return Activity(
        name=raw.activity_type.name,
        attempt=raw.attempt,
        started=_time(raw.last_started_time) if raw.HasField("last_started_time") else None,
        heard=_time(raw.last_heartbeat_time) if raw.HasField("last_heartbeat_time") else None,
        told=_told(raw.heartbeat_details.payloads),
        failure=innermost(raw.last_failure) or None,
        worker=raw.last_worker_identity,
    )


def _told(payloads: Any) -> str | None:
    """Our activities tell one text; what others tell is not for people."""
    told = payload_value(*payloads)
    return told if isinstance(told, str) else None


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(UTC)
