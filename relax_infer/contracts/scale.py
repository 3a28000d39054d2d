"""More and fewer replicas of a model: what is asked, what is told, how it ended."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from relax_infer.contracts.base import Message, StartInput
from relax_infer.contracts.engines import (
    AddedReplica,
    EngineGroupSpec,
    GroupSnapshot,
    ReplicaReport,
)
from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.machines import GroupState, ScaleState

Direction = Literal["out", "in"]
PROVISION_SECONDS = 600.0


class ScaleFailure(StrEnum):
    """Why a replica was not added, or not removed."""

    PROVISION_FAILED = "PROVISION_FAILED"
    """The cluster refused its placement group, or its GPUs are not fit."""
    PROVISION_TIMEOUT = "PROVISION_TIMEOUT"
    """The cluster had no room for it in time."""
    ENGINE_INIT_FAILED = "ENGINE_INIT_FAILED"
    """Its server ended by itself or could not be started."""
    NO_HANDLES = "NO_HANDLES"
    """Its actors could not be made or asked."""
    HEALTH_CHECK_FAILED = "HEALTH_CHECK_FAILED"
    """Its server did not come to answer in time."""
    WEIGHT_SYNC_FAILED = "WEIGHT_SYNC_FAILED"
    """It does not hold the weights that its siblings hold."""
    NCCL_PRECHECK_FAIL = "NCCL_PRECHECK_FAIL"
    """Of weights sent from engine to engine; here they are read from the store."""
    DCS_REGISTRATION_FAILED = "DCS_REGISTRATION_FAILED"
    """Of a weight service; here there is none."""
    ROUTER_REGISTRATION_FAILED = "ROUTER_REGISTRATION_FAILED"
    """Router and gateway could not be told of it."""
    INVALID_ENGINE_ADDRESS = "INVALID_ENGINE_ADDRESS"
    """No added replica or adopted engine of the model has this address; or it is none."""
    EXTERNAL_ENGINE_CONNECT_FAILED = "EXTERNAL_ENGINE_CONNECT_FAILED"
    """Of an engine that others started: it does not answer as SGLang does."""
    UNKNOWN = "UNKNOWN"

    ROUTER_REMOVAL_FAILED = "ROUTER_REMOVAL_FAILED"
    """Router and gateway may still name it; it goes on as it was."""
    WEIGHT_UPDATE_RUNNING = "WEIGHT_UPDATE_RUNNING"
    """The weights of its group were changing until the deadline; it goes on as it was."""
    RECOVERY_RUNNING = "RECOVERY_RUNNING"
    """What is left of it waits for proof."""
    DRAIN_TIMEOUT = "DRAIN_TIMEOUT"
    """It still answers requests; nobody calls it any more."""
    STOP_UNCONFIRMED = "STOP_UNCONFIRMED"
    """A process of it may live: its GPUs stay fenced."""
    PLACEMENT_KEPT = "PLACEMENT_KEPT"
    """It is proved gone; its placement group could not be removed."""


class ScaleRequest(StartInput):
    """Body of InferenceRole's update ``scale``.

    ``operation_id`` is the idempotency key: the same id with the same content joins the operation
    or gets its result; with another content it is an error.
    """

    operation_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    model: str | None = None
    """None: the role's only model."""
    direction: Direction | None = None
    """None: whichever leads to ``num_replicas``."""
    num_replicas: Annotated[int, Field(ge=0)] | None = None
    """Replicas of the model that there shall be, those that it began with included."""
    engine_urls: tuple[str, ...] = ()
    """In place of a number. Out: adopt these engines, which others started. In: remove the added
    replicas, or let go of the adopted engines, with these addresses."""
    on_partial: Literal["keep", "rollback_all"] = "keep"
    """Out by address: what becomes of those that were adopted where others could not be."""
    force: bool = False
    """In: do not wait until the replicas have answered what they had admitted. Everything else is
    waited for all the same."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""
    provision_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = PROVISION_SECONDS
    """Out: seconds for the cluster to find GPUs for a replica."""
    drain_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """In: seconds for admitted requests to end; None: the engines' own."""
    wait: bool = False
    """Answer when the operation has ended, not when it has begun."""
    by: Literal["person", "policy"] = "person"
    """An operation of a policy makes way for one of a person."""
    reason: str | None = None
    """Why it is asked for, in words; a policy's is what it saw."""

    @property
    def fingerprint(self) -> str:
        """What is asked for, whoever asks and why."""
        return self.model_dump_json(exclude={"operation_id", "wait", "by", "reason"})


class ScaleReplica(Message):
    """What became of one replica in an operation."""

    replica: int | None = None
    """None: an address that is nobody's."""
    engine_id: str | None = None
    url: str | None = None
    outcome: Literal["planned", "at work", "added", "removed", "failed", "unchanged", "left"]
    """``failed``: not added, and nothing of it is left. ``unchanged``: not removed, it goes on.
    ``left``: nobody calls it, and something of it may be there; a later operation ends it."""
    failure: ScaleFailure | None = None
    why: str | None = None


class ScaleStatus(Message):
    """An operation as it stands; once ``ended``, as it ended."""

    operation_id: str
    run: str
    role: str
    model: str
    state: ScaleState
    ended: bool = False
    direction: Direction | None = None
    target: int | None = None
    before: int | None = None
    """Replicas of the model when it began, without what was left of others."""
    after: int | None = None
    """The same, when it ended."""
    dry_run: bool = False
    by: Literal["person", "policy"] = "person"
    reason: str | None = None
    """Why it was asked for."""
    why: str | None = None
    replicas: tuple[ScaleReplica, ...] = ()


class ScaleInput(StartInput):
    """Start of ScaleRole."""

    run: RunRef
    role: str
    model: str
    request: ScaleRequest
    operation_timeout: float = 180.0


class OutsiderRecord(Message):
    """An added replica that its group does not operate on: not yet, or not any more."""

    replica: int
    stage: Literal["making", "leaving", "left"]
    """``leaving``: nobody calls it and it is being removed. ``left``: something of it may be there
    and nobody is at work on it."""
    operation: str
    """Id of the scale operation that is at work on it, or was last."""
    placement: AddedReplica | None = None
    """None: it has no GPUs yet, so nothing of it can run."""
    report: ReplicaReport | None = None
    url: str | None = None
    """The last address under which it answered."""
    drained: bool = False
    stopped: bool = False
    """Proved gone; its placement group may be there."""
    failure: ScaleFailure | None = None
    why: str | None = None


class MemberAsk(Message):
    """What ScaleRole asks of a role and of its engine group; payload of ``ask``."""

    method: Literal[
        "members",
        "reserve",
        "placed",
        "adopt",
        "leave",
        "stay",
        "settle",
        "abandon",
        "externals",
        "adopt_external",
        "release_external",
    ]
    model: str
    operation: str
    number: int = 0
    """reserve: replicas that are going to be made."""
    placement: AddedReplica | None = None
    """placed, adopt."""
    replica: int | None = None
    """leave, stay."""
    external: ExternalEngine | None = None
    """adopt_external: as it was checked. release_external: the one to let go of."""
    record: OutsiderRecord | None = None
    """settle: what is left of a replica; None with ``replica``: nothing is."""
    until_ready: bool = False
    """members: answer once the group is READY."""
    timeout: float = 60.0
    """Seconds to wait for the group's turn, or for it to be READY."""


class Members(Message):
    """The answer: the model's replicas as they are now."""

    spec: EngineGroupSpec
    """With every added replica that the group operates on."""
    state: GroupState
    fence: FenceToken | None = None
    weights: WeightsRef | None = None
    """What the group was last given to load."""
    replicas: tuple[ReplicaReport, ...] = ()
    urls: dict[int, str] = Field(default_factory=dict[int, str])
    """Last known address of each added replica."""
    outsiders: tuple[OutsiderRecord, ...] = ()
    externals: tuple[ExternalEngine, ...] = ()
    """Engines of others, in answers of the role."""
    reserved: tuple[int, ...] = ()
    """reserve: the numbers."""
    snapshot: GroupSnapshot | None = None
    """What the role is told besides; the answer may come before that."""
    failure: ScaleFailure | None = None
    """adopt, leave: why it was not done."""
    why: str | None = None

    @property
    def ready(self) -> bool:
        return self.state is GroupState.READY and self.fence is not None


class PlacementAsk(Message):
    """Ask of ``bind_added_replica`` and ``release_added_replica``."""

    run: RunRef
    group: EngineGroupSpec
    replica: int
    timeout: float = PROVISION_SECONDS


class PlacementAnswer(Message):
    """The replica's GPUs, or why it has none."""

    placement: AddedReplica | None = None
    failure: ScaleFailure | None = None
    why: str | None = None


class DrainAsk(Message):
    """Ask of ``drain_engine``."""

    group: EngineGroupSpec
    replica: int
    timeout: float


class DrainAnswer(Message):
    left: int
    """Requests that were not answered in time."""


MEMBER_METHODS: frozenset[str] = frozenset(
    (
        *("members", "reserve", "placed", "adopt", "leave", "stay", "settle", "abandon"),
        *("externals", "adopt_external", "release_external"),
    )
)


def added_pool(spec: EngineGroupSpec, replica: int) -> str:
    """Name of the placement group of an added replica, the same whenever it is asked for.

    Names of a run's pools have no dot: that is how they are told from those of other runs.
    """
    return f"added-{spec.role}-{spec.model.replace('.', '~')}-{replica}"
