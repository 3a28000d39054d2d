"""Every activity that a workflow may call, by name, with its types; the policy is in one table."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from pydantic import BaseModel
from temporalio import workflow
from temporalio.common import RetryPolicy

from relax_infer.contracts.autoscale import LoadAsk, LoadReport
from relax_infer.contracts.batch import (
    EvaluateRequest,
    FinaliseRequest,
    FinaliseResult,
    PhaseRequest,
    PhaseResult,
    PublishRequest,
    PublishResult,
    RegistryPush,
    WriteBackRequest,
    WriteBackResult,
)
from relax_infer.contracts.engines import (
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
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.policies import POLICIES
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.contracts.run import (
    Binding,
    Evaluation,
    FrontAddress,
    RecordRequest,
    ResolveRequest,
    RunPlan,
)
from relax_infer.contracts.scale import DrainAnswer, DrainAsk, PlacementAnswer, PlacementAsk
from relax_infer.contracts.training import TrainerOperation, TrainRequest, TrainResult

I = TypeVar("I", bound=BaseModel)  # noqa: E741
O = TypeVar("O", bound=BaseModel)  # noqa: E741


@dataclass(frozen=True)
class Call(Generic[I, O]):
    """A typed stub of one activity."""

    name: str
    takes: type[I]
    gives: type[O]
    cancelled: workflow.ActivityCancellationType = workflow.ActivityCancellationType.TRY_CANCEL
    """Whether a cancelled call waits until the activity has cleaned up."""

    async def __call__(self, request: I, *, summary: str, within: float | None = None) -> O:
        """Run it under its policy. ``summary`` labels the bar in the web UI's timeline; ``within``
        is in seconds, the wait for a worker and every attempt included."""
        policy = POLICIES[self.name]
        return await workflow.execute_activity(
            self.name,
            request,
            result_type=self.gives,
            task_queue=policy.queue,
            schedule_to_close_timeout=None if within is None else timedelta(seconds=within),
            start_to_close_timeout=timedelta(seconds=policy.start_to_close),
            heartbeat_timeout=timedelta(seconds=policy.heartbeat),
            retry_policy=RetryPolicy(
                maximum_attempts=policy.attempts,
                initial_interval=timedelta(seconds=policy.first_retry),
                maximum_interval=timedelta(seconds=policy.max_retry),
            ),
            cancellation_type=self.cancelled,
            summary=summary,
        )


BIND_ADDED_REPLICA = Call(
    "bind_added_replica",
    PlacementAsk,
    PlacementAnswer,
    cancelled=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
)
RELEASE_ADDED_REPLICA = Call("release_added_replica", PlacementAsk, PlacementAnswer)
DRAIN_ENGINE = Call("drain_engine", DrainAsk, DrainAnswer)
CHECK_EXTERNAL = Call("check_external", ExternalAsk, ExternalReport)
DRAIN_EXTERNAL = Call("drain_external", ExternalAsk, DrainAnswer)
WATCH_EXTERNALS = Call("watch_externals", ExternalWatch, ExternalLoss)
LOOK_AT_LOAD = Call("look_at_load", LoadAsk, LoadReport)

RESOLVE_RECIPE = Call("resolve_recipe", ResolveRequest, RunPlan)
BIND_PLACEMENT = Call("bind_placement", RunPlan, Binding)
RELEASE_PLACEMENT = Call("release_placement", RunRef, RunRef)
ENSURE_FRONT = Call("ensure_front", RunRef, FrontAddress)
PUSH_REGISTRY = Call("push_registry", RegistryPush, FrontAddress)
STOP_FRONT = Call("stop_front", RunRef, RunRef)

LAUNCH_ENGINES = Call("launch_engines", EngineOperation, GroupReport)
LOAD_ENGINE_WEIGHTS = Call("load_engine_weights", EngineOperation, GroupReport)
ONLOAD_ENGINES = Call("onload_engines", EngineOperation, GroupReport)
OFFLOAD_ENGINES = Call("offload_engines", EngineOperation, GroupReport)
WATCH_ENGINES = Call("watch_engines", WatchRequest, WatchReport)
FORGET_ENGINES = Call("forget_engines", EngineOperation, GroupReport)
STOP_ENGINES = Call("stop_engines", EngineOperation, GroupReport)
PROBE_ENGINES = Call("probe_engines", EngineGroupSpec, GroupReport)

CONFIRM_OFFLOAD = {
    role: Call(f"confirm_{role}_offload", OffloadCheck, OffloadConfirmation)
    for role in ("rollout", "genrm", "teacher", "trainer")
}

GENERATE_GROUPS = Call("generate_groups", PhaseRequest, PhaseResult)
JUDGE_SAMPLES = Call("judge_samples", PhaseRequest, PhaseResult)
TEACH_SAMPLES = Call("teach_samples", PhaseRequest, PhaseResult)
EVALUATE_POLICY = Call("evaluate_policy", EvaluateRequest, Evaluation)
WRITE_BACK_SCORES = Call("write_back_scores", WriteBackRequest, WriteBackResult)
FINALISE_BATCH = Call("finalise_batch", FinaliseRequest, FinaliseResult)
WRITE_STEP_RECORD = Call("write_step_record", RecordRequest, StagedRef)

OPEN_TRANSFER_QUEUE = Call("open_transfer_queue", RunRef, RunRef)
PUBLISH_BATCH = Call("publish_batch", PublishRequest, PublishResult)
CLEAR_PARTITION = Call("clear_partition", PublishRequest, RunRef)
CLOSE_TRANSFER_QUEUE = Call("close_transfer_queue", RunRef, RunRef)

ONLOAD_TRAINER = Call("onload_trainer", TrainerOperation, RoleResult)
OFFLOAD_TRAINER = Call("offload_trainer", TrainerOperation, RoleResult)
PROBE_TRAINER = Call("probe_trainer", TrainerOperation, RoleResult)
FORGET_TRAINER = Call("forget_trainer", TrainerOperation, RoleResult)
STOP_TRAINER = Call("stop_trainer", TrainerOperation, RoleResult)
TRAIN_STEP = Call("train_step", TrainRequest, TrainResult)
