"""Requests to the GPU lease and what it answers."""

from typing import Any, Literal

from pydantic import Field

from relax_infer.contracts.autoscale import AutoscalePolicy
from relax_infer.contracts.base import Message, StartInput
from relax_infer.contracts.engines import EngineGroupSpec, GroupSnapshot, LeaseRole
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef, StagedRef, WeightsRef
from relax_infer.contracts.training import TrainerSpec
from relax_infer.machines import BatchState, LeaseState

AcquirePurpose = Literal["startup", "train", "weight_sync", "eval"]
LeaseMethod = Literal[
    "begin_batch",
    "activate",
    "deactivate",
    "acquire",
    "release",
    "acknowledge_rollout_offloaded",
    "begin_student_scoring",
    "commit_batch",
    "fail_batch",
    "wait_committed",
    "reconcile",
    "resolve",
]


class LeaseCommand(Message):
    """One lease operation, as the body of an update.

    ``operation_id`` is the idempotency key: the same id with the same fingerprint (batch, method,
    role, purpose, weights) joins or returns the recorded result; with another it is an error.
    """

    operation_id: str
    batch: str | None = None
    role: LeaseRole | None = None
    purpose: AcquirePurpose | None = None
    weights: WeightsRef | None = None
    """begin_batch, activate, acquire: weights that the role must have resident."""
    message: str | None = None
    """fail_batch: the cause."""
    who: str | None = None
    """resolve: the person who looked."""
    why: str | None = None
    """resolve: what they saw."""
    confirm_released: bool = False
    """resolve: the person says that the blocked role has let go of its GPUs."""
    abandon: bool = False
    """resolve: the pending or failed batch is given up."""


class LeaseRequest(LeaseCommand):
    """A command and what it commands; what workflows send each other."""

    method: LeaseMethod

    @property
    def fingerprint(self) -> str:
        asked = f"{self.method}|{self.batch or ''}|{self.role or ''}|{self.purpose or ''}"
        weights = self.weights
        return asked if weights is None else f"{asked}|{weights.version} {weights.digest}"


class LeaseAnswer(Message):
    """What a lease operation led to."""

    fence: FenceToken | None = None
    """The grant under which the role now is, or was until it let go."""
    evidence: tuple[StagedRef, ...] = ()
    """After an offload: staged lists of ReleaseEvidence."""
    holders: tuple[str, ...] = ()
    """Everything that had to release."""
    resolved_by: str | None = None
    """The person who said that the role had let go; there is no evidence then."""
    weight_version: int | None = None
    """Of the role's resident weights, read back from every replica."""
    weights_digest: str | None = None


class BatchRecord(Message):
    """The batch gate of the lease."""

    batch: str
    state: BatchState
    error: str | None = None
    rollout_released: bool = False
    student_scoring_started: bool = False


class RoleLease(Message):
    """One role's lease."""

    state: LeaseState
    fence: FenceToken | None = None
    reason: str | None = None
    """Why it is BLOCKED."""


class LeaseStatus(Message):
    """Answer of GpuLease's query ``state``."""

    pool: str
    fence_counter: int
    roles: dict[str, RoleLease]
    batch: BatchRecord | None
    holder: str | None
    """The first role that holds its GPUs, if any."""
    holders: tuple[str, ...] = ()
    """Every role that does."""
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of roles that share no GPU; all others exclude each other."""
    transitions: tuple["LeaseTransition", ...] = ()


class LeaseTransition(Message):
    """One change of one role's lease, for reports."""

    at: float
    """Unix seconds, workflow time."""
    role: str
    event: str
    state: str
    fence: int


class LeaseInput(StartInput):
    """Start of GpuLease; the carried part is filled by continue-as-new only."""

    run: RunRef
    pool: str = "default"
    roles: tuple[str, ...]
    operation_timeout: float = 180.0
    """Seconds a role may take to answer before its lease is BLOCKED."""
    reconcile_timeout: float = 120.0
    """Seconds of automatic read-only reconcile before a person is asked."""
    trainer: TrainerSpec | None = None
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of roles that share no GPU."""
    in_place: tuple[str, ...] = ()
    """Roles whose engines take other weights within a grant, without letting go."""
    lost: int = 0
    """Leases of this run whose workflow was ended by hand before this one: above 0, every role is
    in doubt until it is proved to have let go."""
    groups: tuple[EngineGroupSpec, ...] = ()
    """Of all roles, for a lease that follows a lost one: a role tells only once what it has."""
    carried: dict[str, Any] | None = None


class RoleOperation(Message):
    """What the lease asks of a role, and a role of its engine groups."""

    method: Literal["onload", "update", "offload", "probe", "ready", "recover", "stop", "resolve"]
    """``update`` brings other weights to engines that are up, under the grant that they have.
    ``ready`` waits until the role answers again, or is known not to; ``recover`` rebuilds what
    was given up."""
    fence: FenceToken | None
    """The grant; None: the last one the role saw (stop of a run that ends)."""
    weights: WeightsRef | None = None
    word: str | None = None
    """resolve: who says that what blocks is gone, and why."""


class RoleResult(Message):
    """What the role answers."""

    evidence: tuple[StagedRef, ...] = ()
    holders: tuple[str, ...] = ()
    weight_version: int | None = None
    weights_digest: str | None = None
    state: str = ""
    """Probe, resolve: SLEEPING, READY or BLOCKED, as proved under the asked token."""
    why: str | None = None
    """BLOCKED: what stands in the way."""
    snapshot: GroupSnapshot | None = None
    """Of an engine group to its role: what it has become, so that no signal must come first."""
    groups: tuple[EngineGroupSpec, ...] = ()
    """Of a role to its lease, with the first answer in each of its histories: what it operates on,
    for the case that its workflow is ended by hand."""


class RoleCommand(Message):
    """Body of InferenceRole's updates ``onload`` and ``offload``."""

    operation_id: str
    """The lease's idempotency key: the same id joins the operation or gets its result."""
    purpose: AcquirePurpose = "eval"
    """onload: what the GPUs are wanted for."""
    weights: WeightsRef | None = None
    """onload: weights that must be resident; None: those that are."""


class HolderLost(Message):
    """Signal ``holder_lost`` to the lease: its holder cannot go on, and nobody had asked it."""

    role: LeaseRole
    why: str


class RoleInput(StartInput):
    """Start of InferenceRole."""

    run: RunRef
    role: str
    groups: tuple[EngineGroupSpec, ...]
    operation_timeout: float = 180.0
    restarts: int = 0
    """How often a person had the run's roles started anew."""
    shares_with: tuple[str, ...] = ()
    """Roles that use a GPU of this one's."""
    autoscale: dict[str, AutoscalePolicy] = Field(default_factory=dict[str, AutoscalePolicy])
    """Model and when it has more or fewer replicas; others have as many as somebody asks for."""
    carried: dict[str, Any] | None = None


class LifecycleInput(StartInput):
    """Start of EngineLifecycle."""

    run: RunRef
    group: EngineGroupSpec
    operation_timeout: float = 180.0
    carried: dict[str, Any] | None = None
