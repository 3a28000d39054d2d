"""What goes to and comes from groups of inference engines."""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from relax_infer.contracts.base import Message
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.fractions import GpuFraction
from relax_infer.contracts.host import HostIdentity
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.contracts.weights import WeightTransport
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
RESIDUAL_MEMORY = 8 << 30
"""Bytes of a GPU that may stay in use when its holder let go, unless the recipe says otherwise: the
driver tells of the whole device, on which each of four roles may have a device context asleep."""


class BundleBinding(Message):
    """One bundle of a placement group and the device that it turned out to be."""

    bundle: int
    node_id: str
    node_ip: str
    gpu_id: int
    gpu_uuid: str | None = None
    """None where the devices are pretended."""
    host: HostIdentity | None = None
    """What the node's kernel said when it was bound; None: nobody asked it."""

    @property
    def device(self) -> str:
        """Name of the device that no other device of any cluster has."""
        return self.gpu_uuid or f"{self.node_id}/{self.gpu_id}"


class AddedReplica(Message):
    """A replica beyond those that its group began with, on GPUs of its own."""

    replica: int
    """Never used for another replica of the group."""
    placement_group: str
    """Like the group's; holds this replica alone."""
    bundles: tuple[BundleBinding, ...]
    """``gpus_per_replica`` of them, in order."""


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
    """Those that the group began with, numbered from 0."""
    gpus_per_replica: int
    """GPUs of one replica over all of its nodes."""
    nodes_per_replica: int = 1
    """Nodes that one replica spans: a head, which alone is called, and followers."""
    offload: OffloadKind
    ray_gpu_fraction: GpuFraction
    """Share of one GPU that the actor of each node reserves with Ray, in its first bundle."""
    placement_group: str
    """Name of the detached placement group in the Ray namespace ``relax-<run>``."""
    bundles: tuple[BundleBinding, ...]
    """``gpus_per_replica`` consecutive ones for each replica, in order; without the added ones."""
    added: tuple[AddedReplica, ...] = ()
    """Replicas that were added while the group ran, oldest first."""
    device: Literal["cpu", "cuda"]
    python: str | None = None
    """Interpreter of the engine processes; None: the worker's own."""
    server_args: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """SGLang flags without the dashes before them, - and _ alike; True is a bare flag."""
    launch_timeout: float = 300.0
    """Seconds."""
    drain_timeout: float = 120.0
    """Seconds."""
    health_timeout: float = 60.0
    """Seconds without a sign of life after which an engine that should answer counts as lost."""
    store: str
    """fsspec URL of the store, for evidence and request logs."""
    weights: WeightTransport = WeightTransport()
    """How new weights come; what an engine is launched with it reads from its folder."""
    residual_memory: int = RESIDUAL_MEMORY
    """Bytes that may stay in use on each GPU, beside what was in use before the launch, when its
    engine sleeps or is gone."""

    @model_validator(mode="after")
    def _whole_nodes(self) -> "EngineGroupSpec":
        if self.nodes_per_replica < 1 or self.gpus_per_replica % self.nodes_per_replica:
            raise ValueError(
                f"{self.gpus_per_replica} GPUs of a replica cannot be shared evenly by"
                f" {self.nodes_per_replica} nodes"
            )
        return self

    @property
    def namespace(self) -> str:
        return f"relax-{self.run}"

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one replica on each of its nodes."""
        return self.gpus_per_replica // self.nodes_per_replica

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of every replica."""
        return (*range(self.replicas), *(each.replica for each in self.added))

    def pool_of(self, replica: int) -> str:
        """Name of the placement group that a replica is in."""
        added = self.placement_of(replica)
        return self.placement_group if added is None else added.placement_group

    def node_bundles(self, replica: int, node: int) -> tuple[BundleBinding, ...]:
        """The bundles of one replica's share of one node; node 0 is its head's."""
        added = self.placement_of(replica)
        bundles = self.bundles if added is None else added.bundles
        first = replica * self.gpus_per_replica if added is None else 0
        start = first + node * self.gpus_per_node
        return bundles[start : start + self.gpus_per_node]

    def with_added(self, *added: AddedReplica) -> "EngineGroupSpec":
        """The group with these replicas beside those it has."""
        new = {each.replica for each in added}
        kept = (each for each in self.added if each.replica not in new)
        every = sorted((*kept, *added), key=lambda each: each.replica)
        return self.model_copy(update={"added": tuple(every)})

    def without(self, replica: int) -> "EngineGroupSpec":
        """The group without one of its added replicas."""
        kept = tuple(each for each in self.added if each.replica != replica)
        return self.model_copy(update={"added": kept})

    def alone(self, added: AddedReplica) -> "EngineGroupSpec":
        """What is needed to operate on this added replica and on no other of the group."""
        return self.model_copy(update={"replicas": 0, "bundles": (), "added": (added,)})

    def placement_of(self, replica: int) -> AddedReplica | None:
        """Of an added replica; None for one that the group began with."""
        return next((each for each in self.added if each.replica == replica), None)

    def engine_id(self, replica: int) -> str:
        return f"{self.model}/replica-{replica}"

    def actor_name(self, replica: int, node: int = 0) -> str:
        """Ray's name of a node's actor; the head's is the replica's own."""
        head = f"engine.{self.role}.{self.model}.replica-{replica}"
        return f"{head}.node-{node}" if node else head


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
    note: str | None = None
    """Why its weights came from disk and not by the transport of the recipe."""


class NodeMemory(Message):
    """Bytes in use on one node's share of a holder's devices, as its own host counts them."""

    node: int
    before: int | None
    after: int
    allowed: int


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
    nodes: tuple[NodeMemory, ...] = ()
    """The parts of these sums, where a replica spans several nodes: each has to hold by itself."""


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
    replicas: tuple[int, ...] = ()
    """Replicas to operate on; empty: all of the group."""
    ends_grant: bool = True
    """Offload, stop, forget: whether the replica's part of the grant is over; a recovery that
    rebuilds stops the old incarnation within the grant."""
    word: str | None = None
    """Forget: who says that the replicas are gone, and why."""
    traceparent: str | None = None
    """W3C trace context of the activity that asks, for the spans of the engine's actor."""

    @property
    def targets(self) -> tuple[int, ...]:
        return self.replicas or self.group.numbers


class WatchRequest(Message):
    """Ask of ``watch_engines``: say when one of these replicas is no longer what it is."""

    group: EngineGroupSpec
    incarnations: dict[int, str]
    """Replica → the incarnation that is READY now."""


class WatchReport(Message):
    """What changed: one report per replica that is lost."""

    lost: tuple[ReplicaReport, ...]


class GroupSnapshot(Message):
    """What an EngineLifecycle tells its role: enough to publish it."""

    role: Role
    model: str
    state: GroupState
    weight_source: WeightSource
    weight_version: int | None = None
    replicas: tuple[ReplicaReport, ...] = ()
    generations: tuple[int, ...] = ()
    """One per replica, in order; rises with every new incarnation."""
    leaving: tuple[int, ...] = ()
    """Replicas that nobody may call any more: they are being removed, or half of it was done."""
    stuck: str | None = None
    """What of it waits for proof or for a person."""
    number: int = 0
    """Rises with everything that the group tells: signals may overtake each other."""


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
