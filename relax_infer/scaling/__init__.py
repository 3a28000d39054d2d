"""When a role should have more or fewer replicas (pure: it decides, and changes nothing)."""

from relax_infer.scaling.policy import (
    AutoscaleDecision,
    AutoscaleMemory,
    AutoscalePolicy,
    Load,
    decide,
)

__all__ = ["AutoscaleDecision", "AutoscaleMemory", "AutoscalePolicy", "Load", "decide"]
