"""A world of activities in memory, with faults on demand, for tests of what workflows decide.

The one double of the activity layer. It keeps what the real parts keep (who is resident, the
highest fence token, a ledger) and notes every violation of the first
promise. ``test_activities_and_doubles_agree`` holds its names and types against the real ones; the
whole loop runs on the real parts in tests/e2e.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from relax_infer.contracts import batch as b
from relax_infer.contracts.autoscale import LoadAsk, LoadReport
from relax_infer.contracts.engines import (
    BundleBinding,
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    OffloadCheck,
    OffloadConfirmation,
    WatchReport,
    WatchRequest,
)
from relax_infer.contracts.external import (
    ExternalAsk,
    ExternalLoss,
    ExternalReport,
    ExternalWatch,
)
from relax_infer.contracts.fence import FenceMemory
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.refs import RunRef, StagedRef, WeightsRef
from relax_infer.contracts.run import (
    BatchMetrics,
    Binding,
    Evaluation,
    FrontAddress,
    RecordRequest,
    ResolveRequest,
    RunPlan,
)
from relax_infer.contracts.scale import (
    DrainAnswer,
    DrainAsk,
    PlacementAnswer,
    PlacementAsk,
    ScaleFailure,
)
from relax_infer.contracts.training import (
    TrainerOperation,
    TrainerSpec,
    TrainRequest,
    TrainResult,
)
from relax_infer.machines import ReplicaState
from tests.workflows.scripted_engines import STAGED, ScriptedEngines
from tests.workflows.scripted_externals import ScriptedExternals
from tests.workflows.scripted_pools import ScriptedPools

LAUNCH_FAULTS = {
    "die": "Transient: it did not answer within 300 s",
    "exit": "Permanent: its server exited with code 1",
}


def plan(run: str, **changes: Any) -> RunPlan:
    """Two policy engines, a GenRM, a Teacher and a trainer on two GPUs."""
    ref = RunRef(run=run, store="memory://store")

    def group(role: str, replicas: int) -> EngineGroupSpec:
        return EngineGroupSpec.model_validate(
            {
                "run": run,
                "role": role,
                "model": "policy" if role == "rollout" else role,
                "model_path": f"/models/{role}",
                "weight_source": "ACTOR" if role == "rollout" else "STATIC",
                "replicas": replicas,
                "gpus_per_replica": 1,
                "offload": "memory_saver",
                "ray_gpu_fraction": 0.2,
                "placement_group": "pool",
                "bundles": (),
                "device": "cpu",
                "store": ref.store,
            }
        )

    trainer = TrainerSpec(
        run=ref,
        model_path="/models/policy",
        ranks=1,
        placement_group="pool",
        bundles=(),
        ray_gpu_fraction=0.4,
        seed=0,
        learning_rate=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        grad_clip=1.0,
        clip_low=0.2,
        clip_high=0.28,
        mini_batches=2,
        advantage_eps=1e-4,
        use_reward=True,
        distillation=1.0,
        keep_checkpoints=2,
    )
    document: dict[str, Any] = {
        "run": ref,
        "recipe_name": "scripted",
        "recipe_sha256": "0" * 64,
        "steps": 2,
        "roles": ("rollout", "genrm", "teacher", "trainer"),
        "groups": (group("rollout", 2), group("genrm", 1), group("teacher", 1)),
        "trainer": trainer,
        "initial_weights": WeightsRef(version=0, uri="/models/policy", digest="d0"),
        "judged_by_genrm": True,
        "distilled": True,
        "evaluation_every": 2,
        "operation_timeout": 20.0,
        "reconcile_timeout": 2.0,
        "phase_attempts": 3,
    }
    return RunPlan.model_validate(document | changes)


class ScriptedWorld:
    """Activities by name. ``faults[name]`` is a list of faults for its next calls, in order."""

    def __init__(self, **plan_changes: Any) -> None:
        self.plan_changes = plan_changes
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.calls: Counter[str] = Counter()
        self.engines = ScriptedEngines(plan_changes.get("apart", ()))
        self.pools = ScriptedPools(self.engines.violations)
        self.externals = ScriptedExternals()
        self.trainer_fence = FenceMemory()
        self.violations = self.engines.violations
        self.log = self.engines.log
        self.ledger: dict[int, TrainResult] = {}
        self.logprob_gaps: dict[int, float] = {}
        """Step → what its trainer measures; 0 for others."""
        self.partitions: set[str] = set()
        self.records: dict[int, RecordRequest] = {}
        self.generated: dict[int, int] = {}
        """Step → version of the weights that it asked to generate with."""
        self.pushes: list[b.RegistryPush] = []
        self.front = FrontAddress(router_url="http://127.0.0.1:1", gateway_url="http://127.0.0.1:2")
        self.moves_front_at_push = 0
        self.load = LoadReport(in_flight=0.0, replicas=0)
        """What every look at a model's engines sees."""
        self.held, self.go_on = asyncio.Event(), asyncio.Event()
        """Fault ``hold``: the activity tells that it is at work, and waits."""
        self.stuck, self.freed = asyncio.Event(), asyncio.Event()
        """Fault ``hang``: likewise, of any activity, before it does what its next fault says."""

    # --- faults

    async def _fault(self, name: str) -> str:
        """Take the next fault of ``name``: fail before, fail after (a lost reply), or none."""
        self.calls[name] += 1
        queue = self.faults[name]
        fault = queue.pop(0) if queue else ""
        if fault == "hang":
            await self._hold(self.stuck, self.freed)
            return await self._fault(name)
        if fault == "refuse":
            raise ApplicationError(f"{name} refused", type="Permanent", non_retryable=True)
        if fault == "flake":
            raise ApplicationError(f"{name} flaked", type="Transient", non_retryable=False)
        return fault

    async def _hold(
        self, held: asyncio.Event | None = None, go_on: asyncio.Event | None = None
    ) -> None:
        held, go_on = held or self.held, go_on or self.go_on
        held.set()
        while not go_on.is_set():
            activity.heartbeat("12 of 32 groups")
            with suppress(TimeoutError):
                await asyncio.wait_for(go_on.wait(), 1.0)

    @staticmethod
    def _after(fault: str, name: str) -> None:
        if fault == "lose_reply":
            raise ApplicationError(f"{name}: the reply was lost", type="Unconfirmed")

    # --- activities

    def activities(self) -> list[Callable[..., Any]]:
        """Every activity of the project, by its real name."""
        return [
            getattr(self, name)
            for name, member in sorted(vars(type(self)).items())
            if hasattr(member, "__temporal_activity_definition")
        ]

    @activity.defn
    async def resolve_recipe(self, request: ResolveRequest) -> RunPlan:
        fault = await self._fault("resolve_recipe")
        if fault == "hold":
            self.held.set()
            while not self.go_on.is_set():
                activity.heartbeat("trains the tiny models (once for this machine): policy")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.go_on.wait(), 1.0)
        made = plan(request.run, **self.plan_changes)
        steps = request.start.steps
        return made if steps is None else made.model_copy(update={"steps": steps})

    @activity.defn
    async def bind_placement(self, request: RunPlan) -> Binding:
        if await self._fault("bind_placement") == "hold":
            await self._hold()
            await self._fault("bind_placement")
        rows = tuple(
            BundleBinding(bundle=k, node_id="n", node_ip="127.0.0.1", gpu_id=k) for k in range(2)
        )
        groups = tuple(g.model_copy(update={"bundles": rows}) for g in request.groups)
        return Binding(placement_group="pool", plan=request.model_copy(update={"groups": groups}))

    @activity.defn
    async def release_placement(self, run: RunRef) -> RunRef:
        await self._fault("release_placement")
        return run

    @activity.defn
    async def bind_added_replica(self, ask: PlacementAsk) -> PlacementAnswer:
        fault = await self._fault("bind_added_replica")
        if fault == "hold":
            await self._hold()
        if fault == "late":
            failure = ScaleFailure.PROVISION_TIMEOUT
            return PlacementAnswer(failure=failure, why="Ray could not place it in time")
        placement = self.pools.bind(ask)
        self._after(fault, "bind_added_replica")
        return PlacementAnswer(placement=placement)

    @activity.defn
    async def release_added_replica(self, ask: PlacementAsk) -> PlacementAnswer:
        fault = await self._fault("release_added_replica")
        self.pools.release(ask, self.engines)
        self._after(fault, "release_added_replica")
        return PlacementAnswer()

    @activity.defn
    async def drain_engine(self, ask: DrainAsk) -> DrainAnswer:
        fault = await self._fault("drain_engine")
        if fault == "hold":
            await self._hold()
        self.log.append((ask.group.role, f"drain {ask.replica}"))
        return DrainAnswer(left=2 if fault == "busy" else 0)

    @activity.defn
    async def look_at_load(self, ask: LoadAsk) -> LoadReport:
        fault = await self._fault("look_at_load")
        if fault == "hold":
            await self._hold()
        await asyncio.sleep(ask.seconds)
        return self.load

    @activity.defn
    async def check_external(self, ask: ExternalAsk) -> ExternalReport:
        if await self._fault("check_external") == "hold":
            await self._hold()
        return self.externals.check(ask)

    @activity.defn
    async def drain_external(self, ask: ExternalAsk) -> DrainAnswer:
        await self._fault("drain_external")
        return DrainAnswer(left=self.externals.there[ask.url].busy)

    @activity.defn
    async def watch_externals(self, asked: ExternalWatch) -> ExternalLoss:
        await self._fault("watch_externals")
        return await self.externals.watch(asked)

    @activity.defn
    async def ensure_front(self, run: RunRef) -> FrontAddress:
        await self._fault("ensure_front")
        return self.front

    @activity.defn
    async def push_registry(self, push: b.RegistryPush) -> FrontAddress:
        await self._fault("push_registry")
        self.pushes.append(push)
        self.engines.check_routes(push.router_workers or ())
        self._check_others(push.router_others or ())
        if len(self.pushes) == self.moves_front_at_push:
            moved = {"router_url": "http://127.0.0.1:3"}
            self.front = self.front.model_copy(update=moved)
        return self.front

    def _check_others(self, others: Iterable[str]) -> None:
        """Whoever gets an address calls it, those of others too: with one and the same weights."""
        up = [e for e in self.engines.of("rollout") if e.state is ReplicaState.READY]
        held = {e.weights for e in up} | {self.externals.there[url].version for url in others}
        if others and (not up or len(held) > 1):
            self.violations.append(f"{others} are called with other weights: {held}")

    @activity.defn
    async def stop_front(self, run: RunRef) -> RunRef:
        await self._fault("stop_front")
        return run

    @activity.defn
    async def launch_engines(self, operation: EngineOperation) -> GroupReport:
        fault = await self._fault("launch_engines")
        if fault == "hold":
            await self._hold()
        report = self.engines.launch(operation)
        if fault in LAUNCH_FAULTS:
            report = self.engines.fail(operation, LAUNCH_FAULTS[fault])
        self._after(fault, "launch_engines")
        return report

    @activity.defn
    async def load_engine_weights(self, operation: EngineOperation) -> GroupReport:
        fault = await self._fault("load_engine_weights")
        if fault == "hold":
            await self._hold()
        report = self.engines.onload(operation, opens=operation.open_admission)
        if fault in ("die", "die_hidden"):
            hides = fault == "die_hidden"
            report = self.engines.fail(operation, "died while it loaded", hides=hides)
        self._after(fault, "load_engine_weights")
        return report

    @activity.defn
    async def onload_engines(self, operation: EngineOperation) -> GroupReport:
        fault = await self._fault("onload_engines")
        report = self.engines.onload(operation, dies=fault == "die")
        if fault == "other_weights":
            others = {"weights_digest": "other"}
            told = tuple(r.model_copy(update=others) for r in report.replicas)
            report = report.model_copy(update={"replicas": told})
        self._after(fault, "onload_engines")
        return report

    @activity.defn
    async def offload_engines(self, operation: EngineOperation) -> GroupReport:
        fault = await self._fault("offload_engines")
        if fault == "hold":
            await self._hold()
        report = self.engines.offload(operation, wedged=fault == "wedge")
        self._after(fault, "offload_engines")
        return report

    @activity.defn
    async def watch_engines(self, request: WatchRequest) -> WatchReport:
        await self._fault("watch_engines")
        return await self.engines.watch(request)

    @activity.defn
    async def forget_engines(self, operation: EngineOperation) -> GroupReport:
        await self._fault("forget_engines")
        return self.engines.forget(operation)

    @activity.defn
    async def stop_engines(self, operation: EngineOperation) -> GroupReport:
        fault = await self._fault("stop_engines")
        report = self.engines.stop(operation)
        self._after(fault, "stop_engines")
        return report

    @activity.defn
    async def probe_engines(self, group: EngineGroupSpec) -> GroupReport:
        await self._fault("probe_engines")
        return self.engines.report(group)

    async def _confirm(self, name: str, check: OffloadCheck) -> OffloadConfirmation:
        await self._fault(name)
        if self.engines.holds(check.role, check.holders):
            self.violations.append(f"{name}: {check.role} is still resident")
        return OffloadConfirmation(
            role=check.role, holders=len(check.holders), proof=("simulated",)
        )

    @activity.defn
    async def confirm_rollout_offload(self, check: OffloadCheck) -> OffloadConfirmation:
        return await self._confirm("confirm_rollout_offload", check)

    @activity.defn
    async def confirm_genrm_offload(self, check: OffloadCheck) -> OffloadConfirmation:
        return await self._confirm("confirm_genrm_offload", check)

    @activity.defn
    async def confirm_teacher_offload(self, check: OffloadCheck) -> OffloadConfirmation:
        return await self._confirm("confirm_teacher_offload", check)

    @activity.defn
    async def confirm_trainer_offload(self, check: OffloadCheck) -> OffloadConfirmation:
        return await self._confirm("confirm_trainer_offload", check)

    async def _phase(self, name: str, role: str) -> b.PhaseResult:
        fault = await self._fault(name)
        self.log.append((role, name))
        if fault == "hold":
            await self._hold()
        if fault == "kill_engine":
            self.engines.engines[role, 0].die()
        if fault in ("hold", "kill_engine") and not self.engines.answers(
            role, every=fault != "hold"
        ):
            raise ApplicationError(f"{name}: no answer", type="Transient", non_retryable=True)
        ours = role in self.plan_changes.get("roles", (role,))
        if ours and not self.engines.answers(role):
            self.violations.append(f"{name} without an engine of {role} that answers")
        self._after(fault, name)
        return b.PhaseResult(staged=STAGED, attempt=1, requested=256, reused_groups=0)

    @activity.defn
    async def generate_groups(self, request: b.PhaseRequest) -> b.PhaseResult:
        self.generated[request.step] = request.weight_version
        up = [e for e in self.engines.of("rollout") if e.state is ReplicaState.READY]
        if {e.weights for e in up} != {request.weight_version}:
            self.violations.append("generation with other weights than asked")
        return await self._phase("generate_groups", "rollout")

    @activity.defn
    async def judge_samples(self, request: b.PhaseRequest) -> b.PhaseResult:
        return await self._phase("judge_samples", "genrm")

    @activity.defn
    async def teach_samples(self, request: b.PhaseRequest) -> b.PhaseResult:
        return await self._phase("teach_samples", "teacher")

    @activity.defn
    async def evaluate_policy(self, request: b.EvaluateRequest) -> Evaluation:
        await self._phase("evaluate_policy", "rollout")
        return Evaluation(
            step=request.step, weight_version=request.weight_version, problems=512, accuracy=0.5
        )

    @activity.defn
    async def write_back_scores(self, request: b.WriteBackRequest) -> b.WriteBackResult:
        await self._fault("write_back_scores")
        return b.WriteBackResult(staged=STAGED)

    @activity.defn
    async def open_transfer_queue(self, run: RunRef) -> RunRef:
        await self._fault("open_transfer_queue")
        return run

    @activity.defn
    async def publish_batch(self, request: b.PublishRequest) -> b.PublishResult:
        await self._fault("publish_batch")
        partition = f"{request.run.run}/train_{request.step}"
        self.partitions.add(partition)
        return b.PublishResult(partition=partition, keys=256, digest="p")

    @activity.defn
    async def clear_partition(self, request: b.PublishRequest) -> RunRef:
        await self._fault("clear_partition")
        self.partitions.discard(f"{request.run.run}/train_{request.step}")
        return request.run

    @activity.defn
    async def close_transfer_queue(self, run: RunRef) -> RunRef:
        await self._fault("close_transfer_queue")
        return run

    @activity.defn
    async def finalise_batch(self, request: b.FinaliseRequest) -> b.FinaliseResult:
        await self._fault("finalise_batch")
        metrics = BatchMetrics(
            samples=256,
            groups=32,
            dropped_groups=0,
            reward_mean=0.5,
            reward_std=0.5,
            exact_share=0.5,
            teacher_kl=1.0,
            response_tokens=1280,
            truncated=0,
        )
        return b.FinaliseResult(metrics=metrics, export=STAGED)

    @activity.defn
    async def onload_trainer(self, operation: TrainerOperation) -> RoleResult:
        fault = await self._fault("onload_trainer")
        self.trainer_fence.admit(operation.fence)
        self.engines.take("trainer")
        self.log.append(("trainer", "onload"))
        self._after(fault, "onload_trainer")
        return RoleResult(state="READY", holders=("trainer/rank-0",))

    @activity.defn
    async def offload_trainer(self, operation: TrainerOperation) -> RoleResult:
        fault = await self._fault("offload_trainer")
        self.trainer_fence.admit(operation.fence)
        self.engines.trainer_holds = False
        self.log.append(("trainer", "offload"))
        self._after(fault, "offload_trainer")
        return RoleResult(state="SLEEPING", holders=("trainer/rank-0",), evidence=(STAGED,))

    @activity.defn
    async def stop_trainer(self, operation: TrainerOperation) -> RoleResult:
        await self._fault("stop_trainer")
        self.engines.trainer_holds = False
        return RoleResult(state="SLEEPING")

    @activity.defn
    async def forget_trainer(self, operation: TrainerOperation) -> RoleResult:
        await self._fault("forget_trainer")
        self.trainer_fence.admit(operation.fence)
        self.trainer_fence.end()
        self.engines.trainer_holds = False
        return RoleResult(state="SLEEPING")

    @activity.defn
    async def probe_trainer(self, operation: TrainerOperation) -> RoleResult:
        await self._fault("probe_trainer")
        return RoleResult(state="READY" if self.engines.trainer_holds else "SLEEPING")

    @activity.defn
    async def train_step(self, request: TrainRequest) -> TrainResult:
        fault = await self._fault("train_step")
        self.log.append(("trainer", f"train {request.step}"))
        if fault == "hold":
            await self._hold()
            fault = await self._fault("train_step")
        self.trainer_fence.admit(request.fence)
        if fault == "lose_rows":
            self.partitions.clear()
            raise ApplicationError(f"no partition {request.partition}", type="Transient")
        if request.partition not in self.partitions:
            self.violations.append(f"training without partition {request.partition}")
        if request.step not in self.ledger:
            self.ledger[request.step] = TrainResult(
                step=request.step,
                rows=request.keys,
                loss=0.1,
                grad_norm=1.0,
                clip_fraction=0.0,
                policy_kl=0.0,
                logprob_gap=self.logprob_gaps.get(request.step, 0.0),
                tokens=1280,
                seconds=0.1,
                weights=WeightsRef(
                    version=request.step, uri=f"/weights/{request.step}", digest=f"d{request.step}"
                ),
            )
        self._after(fault, "train_step")
        return self.ledger[request.step]

    @activity.defn
    async def write_step_record(self, request: RecordRequest) -> StagedRef:
        await self._fault("write_step_record")
        self.records[request.record.step] = request
        return STAGED


async def until(condition: Callable[[], Any], *, seconds: float = 150.0) -> None:
    """Wait for a condition (sync or async) of the world, up to a bound."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not reached within {seconds} s")
