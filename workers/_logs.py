"""Logs of a worker: what the SDK attaches to its lines becomes what they are about."""

import json
from typing import Any

from temporalio import activity, workflow

from relax_infer.telemetry import configure_logs, subject_of_workflow


def configure_worker_logs() -> None:
    """For the whole process. Lines of workflows and activities name their run in fields, so the
    SDK need not repeat everything that it knows in each message."""
    workflow.logger.workflow_info_on_message = False
    activity.logger.activity_info_on_message = False
    configure_logs(processors=[from_temporal])


def from_temporal(_logger: Any, _method: str, event: Any) -> Any:
    """Workflow id and attempt instead of the SDK's whole description, and the subject of it."""
    for key in ("temporal_workflow", "temporal_activity"):
        told = event.pop(key, None)
        if isinstance(told, str):
            told = json.loads(told)
        if not isinstance(told, dict) or "workflow_id" not in told:
            continue
        event.setdefault("workflow", told["workflow_id"])
        if key == "temporal_activity":
            event.setdefault("activity", told["activity_type"])
            event.setdefault("attempt", told["attempt"])
        for field, value in subject_of_workflow(told["workflow_id"]).items():
            event.setdefault(field, value)
    return event
