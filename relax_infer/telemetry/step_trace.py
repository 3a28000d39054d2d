"""A step as a trace: its spans written from its record, its control share read from them.

The *control share* of a step is the share of its time in which none of its work was going on: no
engine was asked, woken or put to sleep, nothing was trained, joined or published. What is left is
what orchestration costs: workflow tasks, dispatch, signals, checks, waits.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relax_infer.contracts.run import StepRecord
from relax_infer.telemetry.traces import ids_of, write_span

WORK = frozenset(
    {
        *("generate_groups", "judge_samples", "teach_samples", "evaluate_policy"),
        *("launch_engines", "load_engine_weights", "onload_engines", "offload_engines"),
        *("onload_trainer", "offload_trainer", "train_step"),
        *("write_back_scores", "publish_batch", "finalise_batch"),
    }
)
"""Activities that are a step's work; every other one is control."""
STEP, PHASE, ACTIVITY = "step", "phase ", "activity "
"""Names of spans; the latter two are followed by the phase's and the activity's."""


@dataclass(frozen=True)
class Span:
    """One span of an exported trace."""

    trace: str
    name: str
    began: float
    """Unix seconds."""
    ended: float
    attributes: Mapping[str, Any]
    document: Mapping[str, Any]
    """As it was exported, for whoever exports it again."""
    service: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Shares:
    """Where the time of one step went, in seconds."""

    run: str
    step: int
    trace: str
    seconds: float
    control_seconds: float
    phases: dict[str, float] = field(default_factory=dict[str, float])
    activities: dict[str, float] = field(default_factory=dict[str, float])
    """Sum over the runs of each; those that overlap count twice here, never in the share."""

    @property
    def control_share(self) -> float:
        return self.control_seconds / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "control_share": self.control_share}


def write_step(parent: str, record: StepRecord) -> None:
    """The step's own span and one below it for each phase, once its record is durable.

    Args:
        parent: traceparent of the step, whose span this is.
    """
    ids = ids_of(parent)
    phases = record.result.phases
    if ids is None or not phases:
        return
    trace, own = ids
    about = {"relax.run": record.run, "relax.step": record.step}
    ended = phases[-1].started + phases[-1].seconds
    outcome = {**about, "relax.outcome": record.outcome.value}
    write_span(STEP, phases[0].started, ended, trace=trace, own=own, attributes=outcome)
    for k, phase in enumerate(phases):
        write_span(
            f"{PHASE}{phase.phase.value}",
            phase.started,
            phase.started + phase.seconds,
            trace=trace,
            own=_id(f"{parent}/{k}"),
            parent=own,
            attributes={**about, "relax.phase": phase.phase.value},
        )


def read_spans(path: Path) -> Iterator[Span]:
    """Of a file of OTLP as JSON, one document a line; a last line that is half written is left."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield from _spans(json.loads(line))


def spans_of_step(spans: Iterable[Span], run: str, step: int) -> list[Span]:
    """Every span of the newest trace of the step, oldest first; none if there is none."""
    traces: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    mine = [
        found
        for found in traces.values()
        if any(s.attributes.get("relax.run") == run and _step(s) == step for s in found)
        and any(s.name == STEP for s in found)
    ]
    newest = max(mine, key=lambda found: max(s.ended for s in found), default=[])
    return sorted(newest, key=lambda span: (span.began, -span.ended))


def shares(spans: Sequence[Span]) -> Shares:
    """Of the spans of one step.

    Raises:
        ValueError: the step's own span is not among them.
    """
    root = next((span for span in spans if span.name == STEP), None)
    if root is None:
        raise ValueError("the step's own span is missing: it is written when the step has ended")
    phases: defaultdict[str, float] = defaultdict(float)
    activities: defaultdict[str, float] = defaultdict(float)
    work: list[tuple[float, float]] = []
    for span in spans:
        if span.name.startswith(PHASE):
            phases[span.name.removeprefix(PHASE)] += span.seconds
        elif span.name.startswith(ACTIVITY):
            name = span.name.removeprefix(ACTIVITY)
            activities[name] += span.seconds
            if name in WORK:
                work.append((max(span.began, root.began), min(span.ended, root.ended)))
    return Shares(
        run=str(root.attributes["relax.run"]),
        step=_step(root),
        trace=root.trace,
        seconds=root.seconds,
        control_seconds=root.seconds - _union(work),
        phases=dict(phases),
        activities=dict(activities),
    )


def exported(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as one OTLP document."""
    services: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        services[span.service].append(span.document)
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": [{"key": "service.name", "value": {"stringValue": service}}]
                },
                "scopeSpans": [{"scope": {"name": "relax_infer"}, "spans": documents}],
            }
            for service, documents in services.items()
        ]
    }


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(intervals):
        if ended > reached:
            total += ended - max(began, reached)
            reached = ended
    return total


def _spans(document: Mapping[str, Any]) -> Iterator[Span]:
    for resource in document["resourceSpans"]:
        service = _told(resource["resource"]["attributes"]).get("service.name", "")
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    trace=span["traceId"],
                    name=span["name"],
                    began=int(span["startTimeUnixNano"]) / 1e9,
                    ended=int(span["endTimeUnixNano"]) / 1e9,
                    attributes=_told(span.get("attributes", [])),
                    document=span,
                    service=str(service),
                )


def _told(attributes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in attributes:
        ((kind, value),) = each["value"].items()
        found[each["key"]] = int(value) if kind == "intValue" else value
    return found


def _step(span: Span) -> int:
    return int(span.attributes.get("relax.step", -1))


def _id(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
