"""How runs stand, as metrics: from what their workflows answered and their steps wrote down.

Pure: no I/O, no clock. :class:`RunMetrics` is told what was seen and is read when Prometheus asks;
a run that is over is forgotten, and its samples with it.
"""

import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import LeaseStatus, LeaseTransition
from relax_infer.contracts.run import RunStatus, StepRecord
from relax_infer.machines import LEASE, LeaseState
from relax_infer.telemetry.catalogue import METRICS

_EXPECTED_OVER = 20
"""Steps whose median is what the next one is expected to take."""


@dataclass(frozen=True)
class Seen:
    """One look at one run."""

    at: float
    """Unix seconds."""
    status: RunStatus
    lease: LeaseStatus | None = None
    groups: tuple[GroupSnapshot, ...] = ()
    steps: tuple[tuple[int, str, float], ...] = ()
    """Open steps: number, phase, Unix seconds of their start."""
    recoveries: tuple[tuple[str, str], ...] = ()
    """Role and state of every recovery of the run."""
    records: tuple[StepRecord, ...] = ()
    """Of the steps that finished since the look before."""


@dataclass
class _Run:
    seen: Seen
    last: StepRecord | None = None
    accuracy: float | None = None
    steps: int = 0
    seconds: float = 0.0
    phases: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    held: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class RunMetrics(Collector):
    """Told by one task, read by the thread that answers Prometheus."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._took, self._failures = 0.0, 0

    def see(self, seen: Seen) -> None:
        """What a look at a run found."""
        name = seen.status.run
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                run = self._runs[name] = _Run(seen)
            elif seen.lease is not None:
                _add_held(run.held, run.seen.at, seen.at, seen.lease)
            run.seen = seen
            for record in seen.records:
                _add_record(run, record)
            if seen.status.accuracy is not None:
                run.accuracy = seen.status.accuracy

    def keep(self, runs: Iterable[str]) -> None:
        """Forget every other run: it is over."""
        with self._lock:
            for over in self._runs.keys() - set(runs):
                del self._runs[over]

    def missed(self, run: str) -> None:
        """A look at a run failed: what it was before is not told as if it were now."""
        with self._lock:
            self._runs.pop(run, None)
            self._failures += 1

    def took(self, seconds: float) -> None:
        """How long the whole look took."""
        self._took = seconds

    def collect(self) -> list[Metric]:
        families = _Families()
        with self._lock:
            for name, run in self._runs.items():
                _tell_run(families, name, run)
                _tell_lease(families, name, run)
                _tell_training(families, name, run)
            families.put("relax_watch_runs", len(self._runs))
        families.put("relax_watch_seconds", self._took)
        families.put("relax_watch_failures_total", self._failures)
        return families.all


class _Families:
    """Families that have a sample, made from the table of metrics when they get their first."""

    def __init__(self) -> None:
        self._made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """A sample; None: there is none."""
        if value is None:
            return
        family = self._made.get(name)
        if family is None:
            spec = METRICS[name]
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = self._made[name] = kind(name, spec.meaning, labels=spec.labels)
        family.add_metric(labels, value)

    @property
    def all(self) -> list[Metric]:
        return list(self._made.values())


def held_seconds(
    transitions: Sequence[LeaseTransition], role: str, state: LeaseState, since: float, until: float
) -> float:
    """Of ``since`` to ``until``, the seconds in which the role held its GPUs.

    Args:
        transitions: the newest ones, oldest first.
        state: the role's state at ``until``.
    """
    mine = [t for t in transitions if t.role == role and since < t.at <= until]
    edges = [*((t.at, LeaseState(t.state)) for t in mine), (until, state)]
    # Before the first transition it was in a state from which that one leads; where nothing
    # changed it was what it is.
    before = state
    if mine:
        earlier = [t for t in transitions if t.role == role and t.at <= since]
        before = LeaseState(earlier[-1].state) if earlier else LeaseState.SLEEPING
    total, at = 0.0, since
    for moment, now in edges:
        if LEASE.holds(before):
            total += moment - at
        at, before = moment, now
    return total


def _add_held(
    held: defaultdict[str, float], since: float, until: float, lease: LeaseStatus
) -> None:
    for role, told in lease.roles.items():
        held[role] += held_seconds(lease.transitions, role, told.state, since, until)


def _add_record(run: _Run, record: StepRecord) -> None:
    run.last = record
    run.steps += 1
    run.seconds += record.result.seconds
    for phase in record.result.phases:
        run.phases[phase.phase.value] += phase.seconds


def _tell_run(families: _Families, name: str, run: _Run) -> None:
    status, seen = run.seen.status, run.seen
    families.put("relax_run_state", 1, name, status.state.value)
    families.put("relax_run_step", status.step, name)
    families.put("relax_run_target_steps", status.target, name)
    families.put("relax_run_weight_version", status.weight_version, name)
    for step, phase, _ in seen.steps:
        families.put("relax_step_phase", step, name, phase)
    if seen.steps:
        oldest = min(began for _, _, began in seen.steps)
        families.put("relax_step_elapsed_seconds", max(seen.at - oldest, 0.0), name)
    times = [p.seconds for p in status.progress[-_EXPECTED_OVER:] if p.step > 0 and p.seconds]
    if times:
        families.put("relax_step_expected_seconds", statistics.median(times), name)
    families.put("relax_steps_total", run.steps, name)
    families.put("relax_step_seconds_total", run.seconds, name)
    for phase, seconds in run.phases.items():
        families.put("relax_step_phase_seconds_total", seconds, name, phase)


def _tell_lease(families: _Families, name: str, run: _Run) -> None:
    if run.seen.lease is not None:
        for role, lease in run.seen.lease.roles.items():
            families.put("relax_lease_state", 1, name, role, lease.state.value)
            families.put("relax_lease_fence", lease.fence and lease.fence.counter, name, role)
            families.put("relax_lease_held_seconds_total", run.held[role], name, role)
    for group in run.seen.groups:
        for state, count in Counter(r.state.value for r in group.replicas).items():
            families.put("relax_replicas", count, name, group.role, group.model, state)
    for (role, state), count in Counter(run.seen.recoveries).items():
        families.put("relax_recoveries", count, name, role, state)


def _tell_training(families: _Families, name: str, run: _Run) -> None:
    families.put("relax_accuracy", run.accuracy, name)
    batch = run.last.result.batch if run.last else None
    if batch is not None:
        families.put("relax_reward_mean", batch.reward_mean, name)
        families.put("relax_reward_std", batch.reward_std, name)
        families.put("relax_exact_share", batch.exact_share, name)
        families.put("relax_teacher_kl", batch.teacher_kl, name)
        families.put("relax_staleness_steps", batch.staleness, name)
        families.put("relax_batch_samples", batch.samples, name)
        families.put("relax_batch_dropped_groups", batch.dropped_groups, name)
        families.put("relax_batch_truncated_samples", batch.truncated, name)
    trained = run.last.result.training if run.last else None
    if trained is not None:
        families.put("relax_train_loss", trained.loss, name)
        families.put("relax_train_grad_norm", trained.grad_norm, name)
        families.put("relax_train_clip_fraction", trained.clip_fraction, name)
        families.put("relax_train_policy_kl", trained.policy_kl, name)
        families.put("relax_train_logprob_gap", trained.logprob_gap, name)
        if trained.seconds > 0:
            rate = trained.tokens / trained.seconds
            families.put("relax_train_tokens_per_second", rate, name)
        families.put("relax_train_entropy", trained.metrics.get("entropy"), name)
        families.put("relax_train_learning_rate", trained.metrics.get("learning_rate"), name)
