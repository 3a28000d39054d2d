"""What the gateway counts, for Prometheus.

Each gateway has a registry of its own, so that several may live in one process.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from relax_infer.discovery import InferenceRoutingError, Role, RouteResolver
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.telemetry.catalogue import METRICS, meaning

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()

_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters of the data routes, and the registries that are held."""

    def __init__(self, intake: RegistryIntake) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "relax_gateway_requests_total",
            meaning("relax_gateway_requests_total"),
            ("role", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "relax_gateway_request_seconds",
            meaning("relax_gateway_request_seconds"),
            ("role", "route"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._in_flight = Gauge(
            "relax_gateway_requests_in_flight",
            meaning("relax_gateway_requests_in_flight"),
            ("role",),
            registry=self._registry,
        )
        self._aborts = Counter(
            "relax_gateway_aborts_total",
            meaning("relax_gateway_aborts_total"),
            ("role",),
            registry=self._registry,
        )
        self._refused = Counter(
            "relax_gateway_refused_total",
            meaning("relax_gateway_refused_total"),
            ("role", "caller", "reason"),
            registry=self._registry,
        )
        self._registry.register(_Registries(intake))

    def route(self, role: Role, route: str) -> "RouteMetrics":
        """The counters of one route."""
        return RouteMetrics(
            role.value,
            route,
            self._requests,
            self._seconds.labels(role.value, route),
            self._in_flight.labels(role.value),
            self._aborts.labels(role.value),
        )

    def refused(self, role: str, caller: str, reason: str) -> None:
        """Somebody was turned away at the door."""
        self._refused.labels(role, caller, reason).inc()

    def text(self, role: Role | None = None) -> bytes:
        """Everything, or the samples of one role, as Prometheus reads it."""
        return generate_latest(self._registry if role is None else _OfRole(self._registry, role))


class RouteMetrics:
    """One route's counters; labels are looked up once."""

    def __init__(
        self,
        role: str,
        route: str,
        requests: Counter,
        seconds: Histogram,
        in_flight: Gauge,
        aborts: Counter,
    ) -> None:
        self._role, self._route, self._requests = role, route, requests
        self._seconds, self._in_flight, self._aborts = seconds, in_flight, aborts
        self._by_status: dict[int, Counter] = {}

    def begin(self) -> None:
        self._in_flight.inc()

    def end(self, status: int, seconds: float, *, aborted: bool = False) -> None:
        self._in_flight.dec()
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._requests.labels(self._role, self._route, str(status))
            self._by_status[status] = counter
        counter.inc()
        self._seconds.observe(seconds)
        if aborted:
            self._aborts.inc()


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
