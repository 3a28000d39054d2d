"""When a role should have more or fewer replicas (pure: it decides, and changes nothing)."""

from relax_infer.contracts.autoscale import (
    AutoscaleDecision,
    AutoscaleMemory,
    AutoscalePolicy,
    Load,
)
from relax_infer.scaling.policy import FIRST_PAUSE, LONGEST_PAUSE, decide, settled

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "AutoscaleDecision",
    "AutoscaleMemory",
    "AutoscalePolicy",
    "Load",
    "decide",
    "settled",
]
