"""Every state machine of the project, as tables. Pure: no I/O, no clock, nothing else of ours."""

from relax_infer.machines._machine import IllegalTransition, Machine
from relax_infer.machines.group import GROUP, GroupEvent, GroupState
from relax_infer.machines.lease import (
    BATCH,
    LEASE,
    BatchEvent,
    BatchState,
    LeaseEvent,
    LeaseState,
)
from relax_infer.machines.recovery import RECOVERY, RecoveryEvent, RecoveryState
from relax_infer.machines.replica import REPLICA, ReplicaEvent, ReplicaState
from relax_infer.machines.run import RUN, RunEvent, RunState
from relax_infer.machines.scale import SCALE, ScaleEvent, ScaleState
from relax_infer.machines.step import STEP, StepEvent, StepPhase

ALL = (REPLICA, GROUP, RECOVERY, LEASE, BATCH, STEP, RUN, SCALE)

__all__ = [
    "ALL",
    "BATCH",
    "GROUP",
    "LEASE",
    "RECOVERY",
    "REPLICA",
    "RUN",
    "SCALE",
    "STEP",
    "BatchEvent",
    "BatchState",
    "GroupEvent",
    "GroupState",
    "IllegalTransition",
    "LeaseEvent",
    "LeaseState",
    "Machine",
    "RecoveryEvent",
    "RecoveryState",
    "ReplicaEvent",
    "ReplicaState",
    "RunEvent",
    "RunState",
    "ScaleEvent",
    "ScaleState",
    "StepEvent",
    "StepPhase",
]
