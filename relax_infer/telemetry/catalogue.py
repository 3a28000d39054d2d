"""Every metric of this program: name, labels, unit and meaning, in one table.

The code makes its metrics from here, docs/metrics.md is generated from here, and the board and the
alert rules of deploy/observability may name nothing else.
``python -m relax_infer.telemetry.catalogue docs/metrics.md`` writes the page.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_infer.telemetry import _metric_tables as tables

Part = Literal["gateway", "guard", "worker", "sdk"]
Kind = Literal["counter", "gauge", "histogram"]

PARTS: dict[Part, tuple[str, str]] = {
    "worker": (
        "Worker: runs, leases, replicas, training",
        "One worker of a namespace has `RELAX_METRICS_PORT`; it asks Temporal every 15 s"
        " (`RELAX_METRICS_EVERY`) how its open runs stand and reads the records of their steps, so"
        " what it says survives any process. The trainer opens no port: what it measured is in the"
        " step's record. In a local stack the worker has a port by itself: `worker_metrics` of"
        " `stack.json`.",
    ),
    "gateway": (
        "Gateway",
        "`GET /metrics` of the gateway, `GET /genrm/metrics` for one role; always on. With"
        " [tokens](security.md#tokens) it asks for one.",
    ),
    "guard": (
        "Guard of an engine",
        "`GET /guard/metrics` on the public port of an engine, from the guard in front of SGLang,"
        " also while the engine sleeps; always on. SGLang's own metrics are not among them. A"
        " [guard](gateway.md#a-guard-before-an-engine-of-others) before an engine of others has"
        " them, too; its run, role and replica are empty.",
    ),
    "sdk": (
        "Temporal SDK in a worker",
        "The Temporal SDK's own, on `RELAX_SDK_METRICS_PORT` of each worker (`worker_sdk_metrics`"
        " of `stack.json`). These are the ones that board and rules use; all others are in"
        " Temporal's SDK metrics reference.",
    ),
}


@dataclass(frozen=True)
class MetricSpec:
    """One metric, as Prometheus shows it."""

    part: Part
    kind: Kind
    name: str
    labels: tuple[str, ...]
    unit: str
    meaning: str


def _specs() -> dict[str, MetricSpec]:
    found: dict[str, MetricSpec] = {}
    for part, text in tables.TABLES.items():
        for line in text.strip().splitlines():
            kind, name, labels, unit, meaning = (cell.strip() for cell in line.split("|"))
            known = tuple(labels.replace(",", " ").split())
            found[name] = MetricSpec(part, kind, name, known, unit, meaning)  # type: ignore[arg-type]
    return found


METRICS: dict[str, MetricSpec] = _specs()
"""By name; of a counter with its ``_total``, of a histogram without its ``_bucket``."""


def meaning(name: str) -> str:
    """The help text of a metric."""
    return METRICS[name].meaning


def page() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated: make reference -->",
        "",
        "For Prometheus. Every address is on loopback unless somebody chose another; scrape"
        " configuration, board and alert rules are in `deploy/observability/`.",
        "",
    ]
    for part, (title, where) in PARTS.items():
        lines += [f"## {title}", "", where, "", "| metric | kind | labels | unit | what |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for spec in METRICS.values():
            if spec.part == part:
                labels = ", ".join(f"`{label}`" for label in spec.labels)
                cells = (f"`{spec.name}`", spec.kind, labels, spec.unit, spec.meaning)
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
