"""How runs stand, as Prometheus reads it: every sample is in the table, and says what was seen."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relax_infer.contracts.engines import GroupSnapshot, ReplicaReport
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LeaseStatus, LeaseTransition, RoleLease
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import (
    BatchMetrics,
    PhaseTime,
    RunProgress,
    RunStatus,
    StepRecord,
    StepResult,
)
from relax_infer.contracts.training import TrainResult
from relax_infer.machines import GroupState, LeaseState, ReplicaState, RunState, StepPhase
from relax_infer.telemetry.catalogue import METRICS
from relax_infer.telemetry.run_metrics import RunMetrics, Seen, held_seconds

WEIGHTS = WeightsRef(version=3, uri="/w", digest="d")


def record(step: int) -> StepRecord:
    batch = BatchMetrics(
        samples=8,
        groups=2,
        dropped_groups=1,
        reward_mean=0.5,
        reward_std=0.25,
        exact_share=0.4,
        teacher_kl=0.1,
        response_tokens=64,
        truncated=1,
        staleness=2,
    )
    trained = TrainResult(
        step=step,
        rows=8,
        loss=-0.2,
        grad_norm=1.5,
        clip_fraction=0.1,
        policy_kl=0.01,
        logprob_gap=0.02,
        tokens=64,
        seconds=4.0,
        weights=WEIGHTS,
        metrics={"entropy": 1.25, "learning_rate": 1e-4},
    )
    phases = (
        PhaseTime(phase=StepPhase.GENERATING, started=10.0, seconds=2.0),
        PhaseTime(phase=StepPhase.TRAINING, started=12.0, seconds=4.0),
    )
    result = StepResult(step=step, weights=WEIGHTS, batch=batch, training=trained, phases=phases)
    return StepRecord(run="run-1", step=step, outcome=StepPhase.DONE, result=result)


def lease(*transitions: tuple[float, str, str], state: LeaseState) -> LeaseStatus:
    token = FenceToken(counter=7, grant_id="g")
    return LeaseStatus(
        pool="default",
        fence_counter=7,
        roles={
            "rollout": RoleLease(state=state, fence=token),
            "trainer": RoleLease(state=LeaseState.SLEEPING),
        },
        batch=None,
        holder="rollout",
        transitions=tuple(
            LeaseTransition(at=at, role=role, event="E", state=to, fence=7)
            for at, role, to in transitions
        ),
    )


def seen(at: float, lease_status: LeaseStatus, *records: StepRecord) -> Seen:
    progress = tuple(RunProgress(step=n, seconds=float(n)) for n in range(4))
    status = RunStatus(
        run="run-1",
        state=RunState.RUNNING,
        doing="step 4 of 20",
        step=3,
        target=20,
        weight_version=3,
        accuracy=0.75,
        progress=progress,
    )
    report = ReplicaReport(replica=0, engine_id="policy/replica-0", state=ReplicaState.READY)
    group = GroupSnapshot(
        role="rollout",
        model="policy",
        state=GroupState.READY,
        weight_source="ACTOR",
        replicas=(report, report.model_copy(update={"replica": 1})),
    )
    return Seen(
        at=at,
        status=status,
        lease=lease_status,
        groups=(group,),
        steps=((4, "GENERATING", at - 30.0),),
        recoveries=(("rollout", "READMITTED"), ("rollout", "ABANDONED")),
        records=records,
    )


def scraped(metrics: RunMetrics) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    for family in families:
        for sample in family.samples:
            spec = METRICS[sample.name]
            assert (spec.part, set(sample.labels)) == ("worker", set(spec.labels)), sample
            assert family.documentation == spec.meaning
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(s.labels[x] for x in METRICS[s.name].labels)): s.value for s in samples}


def test_every_metric_of_the_table_is_told_of_a_run_that_has_everything():
    metrics = RunMetrics()
    metrics.see(seen(100.0, lease(state=LeaseState.ACTIVE), record(3)))
    told = scraped(metrics)
    assert {name for name, *_ in told} == {s.name for s in METRICS.values() if s.part == "worker"}
    assert told["relax_run_state", "run-1", "RUNNING"] == 1
    assert told["relax_step_phase", "run-1", "GENERATING"] == 4
    assert told["relax_step_elapsed_seconds", "run-1"] == 30
    assert told["relax_step_expected_seconds", "run-1"] == 2
    assert told["relax_step_phase_seconds_total", "run-1", "TRAINING"] == 4
    assert told["relax_replicas", "run-1", "rollout", "policy", "READY"] == 2
    assert told["relax_recoveries", "run-1", "rollout", "ABANDONED"] == 1
    assert told["relax_train_tokens_per_second", "run-1"] == 16
    assert told["relax_staleness_steps", "run-1"] == 2


def test_the_time_that_a_role_holds_its_gpus_adds_up_over_looks():
    metrics = RunMetrics()
    active, asleep = LeaseState.ACTIVE, LeaseState.SLEEPING
    metrics.see(seen(100.0, lease((90.0, "rollout", "ONLOADING"), state=active)))
    metrics.see(seen(115.0, lease((90.0, "rollout", "ACTIVE"), state=active)))
    passed = ((90.0, "rollout", "ACTIVE"), (120.0, "rollout", "SLEEPING"))
    metrics.see(seen(130.0, lease(*passed, state=asleep)))
    assert scraped(metrics)["relax_lease_held_seconds_total", "run-1", "rollout"] == 20


@pytest.mark.parametrize("state", [LeaseState.BLOCKED, LeaseState.DRAINING, LeaseState.ONLOADING])
def test_a_role_in_doubt_or_on_its_way_holds_its_gpus(state: LeaseState):
    assert held_seconds((), "rollout", state, 10.0, 25.0) == 15.0


def test_a_run_that_is_over_or_does_not_answer_is_told_no_more():
    metrics = RunMetrics()
    metrics.see(seen(100.0, lease(state=LeaseState.ACTIVE), record(3)))
    metrics.keep(["run-2"])
    told = scraped(metrics)
    assert {name for name, *_ in told} == {
        *("relax_watch_runs", "relax_watch_seconds", "relax_watch_failures_total")
    }
    metrics.see(seen(100.0, lease(state=LeaseState.ACTIVE)))
    metrics.missed("run-1")
    assert scraped(metrics)["relax_watch_failures_total",] == 1
    assert not any(name == "relax_run_state" for name, *_ in scraped(metrics))
