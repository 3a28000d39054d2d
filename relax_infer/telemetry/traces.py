"""OpenTelemetry traces, one per step. Off unless somewhere to put them is named.

``RELAX_TRACES=file:PATH`` appends OTLP as JSON, a line per batch of spans, which the collector's
``otlpjsonfile`` receiver and Jaeger read; ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or
``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``) sends them to a collector over HTTP. While off, nothing of
OpenTelemetry is imported and :func:`span` costs a comparison.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.telemetry.subjects import subject

Attributes = Mapping[str, str | int | float | bool | None]

HEADER = "traceparent"
"""W3C trace context: ``00-<trace id>-<span id>-01``."""

_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_tracer: Any = None
_provider: Any = None


def traces_file(variables: Mapping[str, str] | None = None) -> Path | None:
    """The file that RELAX_TRACES names.

    Raises:
        PermanentError: it names something else.
    """
    asked = (os.environ if variables is None else variables).get("RELAX_TRACES", "")
    if not asked:
        return None
    kind, _, path = asked.partition(":")
    if kind != "file" or not path:
        raise PermanentError(
            f"RELAX_TRACES is {asked!r}: it must be file:PATH.",
            cure="For a collector set OTEL_EXPORTER_OTLP_ENDPOINT instead.",
        )
    return Path(path)


def configure_traces(service: str) -> bool:
    """Whether spans of this process are kept from now on: somebody has named a place for them.

    Args:
        service: ``service.name``, e.g. ``relax-worker``.
    """
    global _tracer, _provider
    path = traces_file()
    collector = any(os.environ.get(name) for name in _ENDPOINTS)
    if path is None and not collector:
        return False
    if _provider is not None:
        return True
    from opentelemetry.sdk.trace import TracerProvider

    from relax_infer.telemetry._spans import FileExporter, GivenIds, batched, resource

    provider = TracerProvider(resource=resource(service), id_generator=GivenIds())
    if path is not None:
        provider.add_span_processor(batched(FileExporter(path)))
    if collector:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(batched(OTLPSpanExporter()))
    _provider, _tracer = provider, provider.get_tracer("relax_infer")
    return True


def tracing() -> bool:
    """Whether spans of this process are kept."""
    return _tracer is not None


def end_traces() -> None:
    """What is not written yet is written; spans are not kept any more."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def span(
    name: str, *, parent: str | None = None, **attributes: str | int | float | bool | None
) -> "AbstractContextManager[Callable[[str, Any], None]]":
    """A span around the block, below ``parent`` (a traceparent) or else the current span. What the
    block is given sets further attributes; an exception marks the span as failed."""
    return nullcontext(_nothing) if _tracer is None else _span(name, parent, attributes)


def traceparent() -> str | None:
    """Of the current span, to be handed on; None: there is none."""
    if _tracer is None:
        return None
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def trace_headers() -> dict[str, str]:
    """For an HTTP request that belongs to the current span."""
    known = traceparent()
    return {} if known is None else {HEADER: known}


def step_traceparent(workflow: str, execution: str) -> str:
    """Of a step's root span: its ids follow from the workflow's, so whoever replays the workflow,
    and whoever writes the span at the end, knows them."""
    digest = hashlib.sha256(f"{workflow}/{execution}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def ids_of(parent: str | None) -> tuple[int, int] | None:
    """Trace id and span id of a traceparent; None: it is none."""
    match = _PARENT.fullmatch(parent or "")
    return (int(match[1], 16), int(match[2], 16)) if match else None


def write_span(
    name: str,
    began: float,
    ended: float,
    *,
    trace: int,
    own: int | None = None,
    parent: int | None = None,
    attributes: Attributes,
) -> None:
    """A span that is over, from ``began`` to ``ended`` (Unix seconds), under given ids."""
    if _tracer is None:
        return
    from relax_infer.telemetry._spans import given_ids, remote

    with given_ids(trace, own):
        made = _tracer.start_span(
            name,
            context=remote(trace, parent),
            start_time=int(began * 1e9),
            attributes=_known(attributes),
        )
        made.end(end_time=int(max(ended, began) * 1e9))


@contextmanager
def _span(
    name: str, parent: str | None, attributes: Attributes
) -> Iterator[Callable[[str, Any], None]]:
    from relax_infer.telemetry._spans import remote

    ids = ids_of(parent)
    about = {f"relax.{field}": value for field, value in subject().items()}
    made = _tracer.start_as_current_span(
        name,
        context=None if ids is None else remote(*ids),
        attributes=_known({**about, **attributes}),
    )
    with made as opened:
        yield opened.set_attribute


def _known(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {key: value for key, value in attributes.items() if value is not None}


def _nothing(_name: str, _value: Any) -> None:
    return
