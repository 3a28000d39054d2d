"""What traces need of the OpenTelemetry SDK; imported only where spans are kept."""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

_DELAY = 500
"""Milliseconds for which spans are collected: what a kill can lose."""

_given: ContextVar[tuple[int, int | None] | None] = ContextVar("given", default=None)


class GivenIds(RandomIdGenerator):
    """Random ids, unless some are given."""

    def generate_trace_id(self) -> int:
        given = _given.get()
        return given[0] if given else super().generate_trace_id()

    def generate_span_id(self) -> int:
        given = _given.get()
        return (given[1] if given else None) or super().generate_span_id()


@contextmanager
def given_ids(trace: int, span: int | None) -> Iterator[None]:
    token = _given.set((trace, span))
    try:
        yield
    finally:
        _given.reset(token)


def remote(trace: int, span: int | None) -> Context:
    """A parent that is known by its ids; without a span id: there is none."""
    if span is None:
        return Context()
    known = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(known), Context())


def resource(service: str) -> Resource:
    return Resource.create(
        {"service.name": service, "host.name": socket.gethostname(), "process.pid": os.getpid()}
    )


def batched(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(exporter, schedule_delay_millis=_DELAY)


class FileExporter(SpanExporter):
    """OTLP as JSON, a line per batch; several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of runs and prompts' counts are nobody else's business.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = json.dumps(document(spans), separators=(",", ":")) + "\n"
        os.write(self._descriptor, line.encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._descriptor)


def document(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """An OTLP ExportTraceServiceRequest in its JSON form, whose ids are hexadecimal."""
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(spans[0].resource.attributes)},
                "scopeSpans": [
                    {"scope": {"name": "relax_infer"}, "spans": [_span(each) for each in spans]}
                ],
            }
        ]
    }


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    told: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
    }
    if span.parent is not None:
        told["parentSpanId"] = f"{span.parent.span_id:016x}"
    if not span.status.is_ok and span.status.description:
        told["status"] = {"code": 2, "message": span.status.description}
    return told


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
