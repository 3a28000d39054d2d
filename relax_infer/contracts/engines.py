"""What goes to and comes from groups of inference engines."""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from relax_infer.contracts.base import Message
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.fractions import GpuFraction
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.machines import GroupState, ReplicaState

Role = Literal["rollout", "genrm", "teacher"]
LeaseRole = Literal["rollout", "genrm", "teacher", "trainer"]
OffloadKind = Literal["memory_saver", "restart"]
WeightSource = Literal["STATIC", "ACTOR", "DCS"]

LEASE_ROLES: tuple[LeaseRole, ...] = ("rollout", "genrm", "teacher", "trainer")
RESIDENT_TAGS = ("weights", "kv_cache", "cuda_graph")
"""What an engine holds on its GPUs, in the order in which it comes back."""
TRAINER_TAGS = ("parameters", "gradients", "optimizer")
"""What a trainer rank holds on its GPU."""


class BundleBinding(Message):
    """One bundle of a placement group and the device that it turned out to be."""

    bundle: int
    node_id: str
    node_ip: str
    gpu_id: int
    gpu_uuid: str | None = None
    """None where the devices are pretended."""


class EngineGroupSpec(Message):
    """Everything that is needed to launch and operate one engine group, on any worker."""

    run: str
    role: Role
    model: str
    """Model id in the role's registry."""
    model_path: str
    """Hugging Face folder that the engines start from."""
    weight_source: WeightSource
    replicas: int
    gpus_per_replica: int
    offload: OffloadKind
    ray_gpu_fraction: GpuFraction
    """Share of one GPU that an engine actor reserves with Ray in each of its bundles."""
    placement_group: str
    """Name of the detached placement group in the Ray namespace ``relax-<run>``."""
    bundles: tuple[BundleBinding, ...]
    """``gpus_per_replica`` consecutive ones for each replica, in order."""
    device: Literal["cpu", "cuda"]
    python: str | None = None
    """Interpreter of the engine processes; None: the worker's own."""
    server_args: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """SGLang flags without dashes; True is a bare flag."""
    launch_timeout: float = 300.0
    """Seconds."""
    drain_timeout: float = 120.0
    """Seconds."""
    store: str
    """fsspec URL of the store, for evidence and request logs."""

    @property
    def namespace(self) -> str:
        return f"relax-{self.run}"

    def engine_id(self, replica: int) -> str:
        return f"{self.model}/replica-{replica}"

    def actor_name(self, replica: int) -> str:
        return f"engine.{self.role}.{self.model}.replica-{replica}"


class ReplicaReport(Message):
    """What is known of one replica after an operation or a probe."""

    replica: int
    engine_id: str
    state: ReplicaState
    base_url: str | None = None
    """Public, fenced address of the head; None while it must not be called."""
    incarnation: str | None = None
    weight_version: int | None = None
    weights_digest: str | None = None
    """Digest of the weights that the engine itself computed."""
    fence: FenceToken | None = None
    """Highest token that the engine has seen."""
    error: str | None = None


class ReleaseEvidence(Message):
    """Why one replica (or the trainer) is believed to have let go of its GPUs."""

    holder: str
    """Engine id, or ``trainer/rank-<k>``."""
    proof: Literal["memory", "process_gone", "simulated"]
    """``simulated``: the device cannot tell (a CPU frees nothing)."""
    tags: tuple[str, ...]
    """Released tags, exactly what was asked."""
    fence: FenceToken
    at: float
    """Unix seconds."""
    memory_before: int | None = None
    """Bytes in use on the holder's devices before the release."""
    memory_after: int | None = None
    residual_allowed: int | None = None
    """Bytes that may remain (a sleeping engine keeps a device context)."""


class GroupReport(Message):
    """The whole group after an operation or a probe."""

    replicas: tuple[ReplicaReport, ...] = ()
    evidence: StagedRef | None = None
    """Staged list of :class:`ReleaseEvidence`, after an offload or a stop."""

    def errors(self) -> tuple[str, ...]:
        return tuple(f"{r.engine_id}: {r.error}" for r in self.replicas if r.error)


class EngineOperation(Message):
    """One operation on an engine group. The same operation id joins or returns its result."""

    group: EngineGroupSpec
    operation_id: str
    fence: FenceToken
    weights: WeightsRef | None = None
    """Weights to be resident after the operation (launch, onload, load)."""
    open_admission: bool = True
    """Onload: also open the engines' admission."""


class GroupSnapshot(Message):
    """What an EngineLifecycle tells its role: enough to publish it."""

    role: Role
    model: str
    state: GroupState
    weight_source: WeightSource
    weight_version: int | None = None
    replicas: tuple[ReplicaReport, ...] = ()
    generations: tuple[int, ...] = ()
    """One per replica, in order; rises with every new incarnation or address."""


class OffloadCheck(Message):
    """Ask of ``confirm_<role>_offload``: does this evidence prove the release under this token?"""

    role: LeaseRole
    fence: FenceToken
    evidence: tuple[StagedRef, ...]
    """Staged lists of :class:`ReleaseEvidence`, one per engine group."""
    holders: tuple[str, ...]
    """Every holder that must appear, exactly once."""
    tags: tuple[str, ...] = RESIDENT_TAGS
    """Left out: what this role holds, ``TRAINER_TAGS`` for the trainer."""

    @model_validator(mode="before")
    @classmethod
    def _tags_of_role(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, Any]", values)
        return {"tags": TRAINER_TAGS, **given} if given.get("role") == "trainer" else given


class OffloadConfirmation(Message):
    """The result of reading the evidence."""

    role: LeaseRole
    holders: int
    proof: tuple[str, ...]
    """The distinct kinds of proof seen."""
