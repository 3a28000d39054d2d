"""Placement: which GPUs each role uses (pure), and which devices they turned out to be (Ray)."""

from relax_infer.placement.binding import bind_pool, find_pool, pool_name, release_pool
from relax_infer.placement.plan import (
    POOL,
    InferencePlacementPlan,
    Placement,
    PlacementError,
    Violation,
    model_placement,
    plan_inference_placement,
)
from relax_infer.placement.topology import validate_bound_placement

__all__ = [
    "POOL",
    "InferencePlacementPlan",
    "Placement",
    "PlacementError",
    "Violation",
    "bind_pool",
    "find_pool",
    "model_placement",
    "plan_inference_placement",
    "pool_name",
    "release_pool",
    "validate_bound_placement",
]
