"""Placement: which GPUs each role uses (pure), and which devices they turned out to be (Ray)."""

from relax_infer.placement.binding import bind_pool, find_pool, pool_name, release_pool
from relax_infer.placement.layout import LayoutError, parse_layout
from relax_infer.placement.placed import (
    POOL,
    InferencePlacementPlan,
    Phase,
    Placement,
    PlacementError,
    Slot,
    TrainingPlacement,
    Transition,
    Violation,
    model_placement,
)
from relax_infer.placement.plan import plan_inference_placement
from relax_infer.placement.topology import validate_bound_placement

__all__ = [
    "POOL",
    "InferencePlacementPlan",
    "LayoutError",
    "Phase",
    "Placement",
    "PlacementError",
    "Slot",
    "TrainingPlacement",
    "Transition",
    "Violation",
    "bind_pool",
    "find_pool",
    "model_placement",
    "parse_layout",
    "plan_inference_placement",
    "pool_name",
    "release_pool",
    "validate_bound_placement",
]
