"""Placement: which GPUs each role uses (pure), and which devices they turned out to be (Ray)."""

from relax_infer.placement.binding import bind_plan, bind_pool
from relax_infer.placement.layout import LayoutError, parse_layout
from relax_infer.placement.picture import placement_svg
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
from relax_infer.placement.pools import find_pool, pool_name, release_pool, release_pools
from relax_infer.placement.topology import validate_bound_placement, validate_bound_plan

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
    "bind_plan",
    "bind_pool",
    "find_pool",
    "model_placement",
    "parse_layout",
    "placement_svg",
    "plan_inference_placement",
    "pool_name",
    "release_pool",
    "release_pools",
    "validate_bound_placement",
    "validate_bound_plan",
]
