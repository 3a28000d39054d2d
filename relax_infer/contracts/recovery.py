"""The recovery of one replica: what it is asked, what it tells, how it ends."""

from relax_infer.contracts.base import Message, StartInput
from relax_infer.contracts.engines import EngineGroupSpec, ReplicaReport
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef, StagedRef, WeightsRef
from relax_infer.machines import RecoveryState


class RecoveryInput(StartInput):
    """Start of ReplicaRecovery."""

    run: RunRef
    group: EngineGroupSpec
    replica: int
    fence: FenceToken
    """The grant under which the replica is stopped and rebuilt; a later grant makes it stale."""
    weights: WeightsRef | None = None
    """What the replica must hold again; None: what it was launched with."""
    rebuild: bool
    """False: its GPUs must be free, and nobody needs it now."""
    cause: str
    """Why it is recovered, for people."""
    restarts: int = 3
    """Launches that may fail before it is given up."""
    backoff: float = 2.0
    """Seconds before the second launch; doubles."""


class RecoveryNote(Message):
    """Signal ``recovery_changed`` to the engine group: a recovery entered a state."""

    replica: int
    state: RecoveryState
    why: str | None = None
    """BLOCKED and ABANDONED: what is missing; a state entered again: what failed before."""


class RecoveryTrace(Message):
    """A recovery as it went, for reports."""

    workflow: str
    """Its workflow id."""
    engine_id: str
    role: str
    cause: str
    states: tuple[tuple[RecoveryState, float], ...]
    """Each state with the Unix seconds at which it was entered; the first is when the loss was
    noticed and the replica fenced."""
    ended: float | None = None
    """Unix seconds; None: it had not when this was written."""
    why: str | None = None
    """Why it was not rebuilt."""
    resolved_by: str | None = None


class RecoveryResult(Message):
    """READMITTED with the replica's report, or ABANDONED with its GPUs free."""

    replica: int
    state: RecoveryState
    report: ReplicaReport | None = None
    evidence: tuple[StagedRef, ...] = ()
    """Staged ReleaseEvidence of the stop; none after a person's word."""
    why: str | None = None
    """ABANDONED: why it was not rebuilt; None if nobody asked for that."""
    resolved_by: str | None = None
    """The person whose word stands in for the proof."""
    restarts: int = 0
