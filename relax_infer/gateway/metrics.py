"""What the gateway counts, for Prometheus.

Each gateway has a registry of its own, so that several may live in one process.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from relax_infer.discovery import InferenceRoutingError, Role, RouteResolver
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.telemetry.catalogue import METRICS, meaning

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters of the data routes, and the registries that are held."""

    def __init__(self, intake: RegistryIntake) -> None:
        self._registry = CollectorRegistry()
        self._refused = Counter(
            "relax_gateway_refused_total",
            meaning("relax_gateway_refused_total"),
            ("role", "caller", "reason"),
            registry=self._registry,
        )
        self._routes = _Routes()
        self._registry.register(self._routes)
        self._registry.register(_Registries(intake))

    def route(self, role: Role, route: str) -> "RouteMetrics":
        """The counters of one route."""
        return self._routes.add(RouteMetrics(role.value, route))

    def refused(self, role: str, caller: str, reason: str) -> None:
        """Somebody was turned away at the door."""
        self._refused.labels(role, caller, reason).inc()

    def text(self, role: Role | None = None) -> bytes:
        """Everything, or the samples of one role, as Prometheus reads it."""
        return generate_latest(self._registry if role is None else _OfRole(self._registry, role))


class RouteMetrics:
    """One route's counters. Plain numbers, since only the gateway's own thread counts: with locks
    and labels counting was a tenth of what a request costs."""

    __slots__ = ("aborts", "buckets", "by_status", "in_flight", "role", "route", "seconds")

    def __init__(self, role: str, route: str) -> None:
        self.role, self.route = role, route
        self.in_flight = self.aborts = 0
        self.seconds = 0.0
        self.by_status: dict[int, int] = {}
        self.buckets = [0] * (len(_BUCKETS) + 1)
        """Not cumulative; the last is of what took longer than all."""

    def begin(self) -> None:
        self.in_flight += 1

    def end(self, status: int, seconds: float, *, aborted: bool = False) -> None:
        self.in_flight -= 1
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.seconds += seconds
        self.buckets[bisect_left(_BUCKETS, seconds)] += 1
        self.aborts += aborted


class _Routes(Collector):
    """Read when Prometheus asks."""

    def __init__(self) -> None:
        self._routes: list[RouteMetrics] = []

    def add(self, route: RouteMetrics) -> RouteMetrics:
        self._routes.append(route)
        return route

    def collect(self) -> Iterable[Metric]:
        requests = _counter("relax_gateway_requests_total")
        aborts = _counter("relax_gateway_aborts_total")
        in_flight = _gauge("relax_gateway_requests_in_flight")
        name = "relax_gateway_request_seconds"
        seconds = HistogramMetricFamily(name, meaning(name), labels=METRICS[name].labels)
        under_way: dict[str, int] = {}
        aborted: dict[str, int] = {}
        for each in self._routes:
            under_way[each.role] = under_way.get(each.role, 0) + each.in_flight
            aborted[each.role] = aborted.get(each.role, 0) + each.aborts
            for status, count in each.by_status.items():
                requests.add_metric([each.role, each.route, str(status)], count)
            bounds = [*(floatToGoString(bound) for bound in _BUCKETS), "+Inf"]
            buckets = list(zip(bounds, accumulate(each.buckets), strict=True))
            seconds.add_metric([each.role, each.route], buckets, each.seconds)
        for role, count in under_way.items():
            in_flight.add_metric([role], count)
            aborts.add_metric([role], aborted[role])
        return requests, seconds, in_flight, aborts


class _Registries(Collector):
    """Read when Prometheus asks."""

    def __init__(self, intake: RegistryIntake) -> None:
        self._intake = intake

    def collect(self) -> Iterable[Metric]:
        revision = _gauge("relax_gateway_topology_revision")
        term = _gauge("relax_gateway_registry_term")
        ready = _gauge("relax_gateway_model_ready")
        for role in Role:
            held = self._intake.get(role)
            if held is None:
                continue
            revision.add_metric([role.value], held.snapshot.topology_revision)
            term.add_metric([role.value], held.term)
            for model in held.snapshot.models:
                try:
                    RouteResolver().resolve(held.snapshot, model=model, affinity_key="metrics")
                    ready.add_metric([role.value, model], 1)
                except InferenceRoutingError:
                    ready.add_metric([role.value, model], 0)
        return revision, term, ready


def _counter(name: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, meaning(name), labels=METRICS[name].labels)


def _gauge(name: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning(name), labels=METRICS[name].labels)


class _OfRole(CollectorRegistry):
    """A registry's samples that carry one role."""

    def __init__(self, whole: CollectorRegistry, role: Role) -> None:
        super().__init__()
        self._whole, self._role = whole, role.value

    def collect(self) -> Iterator[Metric]:
        for metric in self._whole.collect():
            metric.samples = [s for s in metric.samples if s.labels.get("role") == self._role]
            if metric.samples:
                yield metric
