"""Recipes for the planner: short, with every role that a test asks for."""

from typing import Any

from relax_infer.config import Recipe, load_recipe, read_recipe
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    Violation,
    plan_inference_placement,
)


def engine(gpus: int, size: int = 1, **more: Any) -> dict[str, Any]:
    """``gpus`` in engines of ``size``."""
    return {"replicas": gpus // size, "gpus_per_replica": size, **more}


def document(
    mode: str = "defer",
    gpus: int = 8,
    *,
    ranks: int | None = None,
    rollout: dict[str, Any] | None = None,
    genrm: dict[str, Any] | None = None,
    teacher: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A recipe as a mapping; roles are their engine sections, None: the role takes no part."""
    recipe: dict[str, Any] = {
        "name": "placed",
        "mode": mode,
        "cluster": {"gpus": gpus, "gpus_per_node": 8},
        "rollout": {"model": "policy", "engine": rollout or engine(4)},
        "reward": {"source": "exact" if genrm is None else "genrm"},
        "train": {"ranks": gpus if ranks is None else ranks},
    }
    if genrm is not None:
        recipe["genrm"] = {"model": "judge", "engine": genrm}
    if teacher is not None:
        recipe["teacher"] = {"model": "teacher", "engine": teacher}
        recipe["distillation"] = {"coefficient": 1.0}
    return recipe | more


def read(recipe: dict[str, Any], **overrides: Any) -> Recipe:
    """With dotted keys whose dots are written as two underscores."""
    return load_recipe(recipe, {key.replace("__", "."): v for key, v in overrides.items()})


def plan(recipe: dict[str, Any], **overrides: Any) -> InferencePlacementPlan:
    return plan_inference_placement(read(recipe, **overrides))


def refused(recipe: dict[str, Any], **overrides: Any) -> tuple[Violation, ...]:
    """Why it cannot be placed, rules that have nothing to do with placement among them."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    try:
        made = plan_inference_placement(read_recipe(recipe, keys))
    except PlacementError as error:
        return error.violations
    raise AssertionError(f"was placed: {made.to_dict()}")


def slices(made: InferencePlacementPlan) -> list[tuple[str, str, int, int]]:
    """Role, model and bundles of every placement."""
    return [(p.role, p.model_id, p.bundle_start, p.bundle_stop) for p in made.placements]
