"""What the guard in front of an engine counts, for Prometheus: one registry per guard."""

import json
import os
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from relax_infer.engines.command import ABOUT
from relax_infer.engines.request_log import Reason
from relax_infer.gateway.gate import AdmissionGate
from relax_infer.telemetry.catalogue import METRICS

_DRAIN_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class GuardMetrics:
    """A counter costs about a microsecond per request; gauges are read when somebody asks."""

    def __init__(self, gate: AdmissionGate, fence: Callable[[], int]) -> None:
        """``fence``: counter of the highest token seen."""
        about = json.loads(os.environ.get(ABOUT, "{}"))
        labels = ("run", "role", "replica")
        values = tuple(str(about.get(name, "")) for name in labels)
        self._registry = CollectorRegistry()

        def counter(name: str, *more: str) -> Counter:
            text = METRICS[name].meaning
            return Counter(name, text, (*labels, *more), registry=self._registry)

        def gauge(name: str, read: Callable[[], float]) -> None:
            made = Gauge(name, METRICS[name].meaning, labels, registry=self._registry)
            made.labels(*values).set_function(read)

        self._admitted = counter("relax_guard_admitted_total").labels(*values)
        refused = counter("relax_guard_refused_total", "reason")
        turned: tuple[Reason, ...] = ("closed", "body")
        self._refused = {reason: refused.labels(*values, reason) for reason in turned}
        ended = counter("relax_guard_ended_total", "reason")
        reasons: tuple[Reason, ...] = ("answered", "disconnected", "cancelled", "failed")
        self._ended = {reason: ended.labels(*values, reason) for reason in reasons}
        gauge("relax_guard_requests_in_flight", lambda: gate.inflight)
        gauge("relax_guard_open", lambda: float(gate.ready))
        gauge("relax_guard_fence", fence)
        self._drains = Histogram(
            "relax_guard_drain_seconds",
            METRICS["relax_guard_drain_seconds"].meaning,
            labels,
            buckets=_DRAIN_BUCKETS,
            registry=self._registry,
        ).labels(*values)
        self._closed: float | None = None

    def admitted(self) -> None:
        self._admitted.inc()

    def refused(self, reason: Reason) -> None:
        self._refused[reason].inc()

    def ended(self, reason: Reason) -> None:
        self._ended[reason].inc()

    def closed(self) -> None:
        """The gate closes; a repeat does not start the clock again."""
        if self._closed is None:
            self._closed = time.monotonic()

    def drained(self) -> None:
        """The engine was seen idle."""
        if self._closed is not None:
            self._drains.observe(time.monotonic() - self._closed)
            self._closed = None

    def text(self) -> bytes:
        return generate_latest(self._registry)
