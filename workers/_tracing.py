"""Carries a step's trace through workflows, signals and activities.

The SDK's own OpenTelemetry interceptor follows workflows: a signal is only a link to it, so what an
engine group does for a step would be in the group's trace, which has no end. Here the cause is
followed: whatever a step's ask leads to is in the step's trace. Only its ids travel through
workflows, in headers, which no replay compares; a step's ids follow from its workflow's, and no
span is made inside a workflow.
"""

from contextvars import ContextVar
from typing import Any, cast

from temporalio import activity, workflow
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadConverter
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    ExecuteWorkflowInput,
    HandleSignalInput,
    Interceptor,
    SignalChildWorkflowInput,
    SignalExternalWorkflowInput,
    StartActivityInput,
    StartChildWorkflowInput,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
    WorkflowOutboundInterceptor,
)

from relax_infer.contracts.run import RecordRequest
from relax_infer.telemetry.step_trace import ACTIVITY, write_step
from relax_infer.telemetry.traces import span, step_traceparent

KEY = "relax-trace"
"""Header with the step's traceparent."""

_converter = PayloadConverter.default
_here: ContextVar[str | None] = ContextVar("step trace", default=None)
"""Of the task that runs: each signal's handler has its own."""


class StepTraces(Interceptor):
    """For a worker whose process keeps spans (``configure_traces``)."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Activities(next)

    def workflow_interceptor_class(
        self, input: WorkflowInterceptorClassInput
    ) -> type[WorkflowInboundInterceptor]:
        return _Workflows


class _Workflows(WorkflowInboundInterceptor):
    def init(self, outbound: WorkflowOutboundInterceptor) -> None:
        super().init(_Outbound(outbound))

    async def execute_workflow(self, input: ExecuteWorkflowInput) -> Any:
        info = workflow.info()
        own = info.workflow_type == "TrainingStep"
        _here.set(step_traceparent(info.workflow_id, info.run_id) if own else _told(input.headers))
        return await super().execute_workflow(input)

    async def handle_signal(self, input: HandleSignalInput) -> None:
        _here.set(_told(input.headers))
        await super().handle_signal(input)


class _Outbound(WorkflowOutboundInterceptor):
    def start_activity(self, input: StartActivityInput) -> workflow.ActivityHandle[Any]:
        input.headers = _with_trace(input.headers)
        return super().start_activity(input)

    async def start_child_workflow(
        self, input: StartChildWorkflowInput
    ) -> workflow.ChildWorkflowHandle[Any, Any]:
        input.headers = _with_trace(input.headers)
        return await super().start_child_workflow(input)

    async def signal_child_workflow(self, input: SignalChildWorkflowInput) -> None:
        input.headers = _with_trace(input.headers)
        await super().signal_child_workflow(input)

    async def signal_external_workflow(self, input: SignalExternalWorkflowInput) -> None:
        input.headers = _with_trace(input.headers)
        await super().signal_external_workflow(input)


class _Activities(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        parent = _told(input.headers)
        if parent is None:
            return await super().execute_activity(input)
        info = activity.info()
        told = {"temporal.workflow": info.workflow_id, "temporal.attempt": info.attempt}
        with span(f"{ACTIVITY}{info.activity_type}", parent=parent, **told):
            result = await super().execute_activity(input)
        if info.activity_type == "write_step_record":
            write_step(parent, cast("RecordRequest", input.args[0]).record)
        return result


def _told(headers: Any) -> str | None:
    payload: Payload | None = headers.get(KEY)
    return None if payload is None else _converter.from_payload(payload, str)


def _with_trace(headers: Any) -> dict[str, Payload]:
    here = _here.get()
    if here is None:
        return dict(headers or {})
    return {**(headers or {}), KEY: _converter.to_payload(here)}
