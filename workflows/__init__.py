"""Deterministic code only: state machines and the order of things.

No I/O and no clock but workflow time. Activities are reached by name (``_calls``), never imported.
"""

from workflows.engine_lifecycle import EngineLifecycle
from workflows.gpu_lease import GpuLease
from workflows.inference_role import InferenceRole
from workflows.replica_recovery import ReplicaRecovery
from workflows.scale_role import ScaleRole
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep
from workflows.weight_sync import WeightSync

WORKFLOWS = (
    TrainingRun,
    TrainingStep,
    GpuLease,
    InferenceRole,
    EngineLifecycle,
    ReplicaRecovery,
    ScaleRole,
    WeightSync,
)

__all__ = [
    "WORKFLOWS",
    "EngineLifecycle",
    "GpuLease",
    "InferenceRole",
    "ReplicaRecovery",
    "ScaleRole",
    "TrainingRun",
    "TrainingStep",
    "WeightSync",
]
