"""Which bundles of which pool each role uses: a pure function of the recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_infer.config import Recipe
from relax_infer.config.rules import broken_rules
from relax_infer.placement._arrange import Arrangement, arrange, unused_layout
from relax_infer.placement._autoscale_rules import autoscale_violations
from relax_infer.placement._demands import Demand, inference_demands, training_demands
from relax_infer.placement._engine_rules import engine_violations
from relax_infer.placement._rules import role_violations
from relax_infer.placement._size_rules import size_violations
from relax_infer.placement._transport_rules import transport_violations
from relax_infer.placement.cures import with_uncovered
from relax_infer.placement.phases import phases_of
from relax_infer.placement.placed import (
    InferencePlacementPlan,
    PlacementError,
    TrainingRole,
    Violation,
)
from relax_infer.placement.ray_shares import Claim, computed_shares, share_violations

_SHARE_FIELDS: Mapping[TrainingRole, str] = {
    "trainer": "train.ray_gpu_fraction",
    "critic": "critic.ray_gpu_fraction",
    "reference": "reference.ray_gpu_fraction",
    "actor_fwd": "actor_fwd.ray_gpu_fraction",
}


def plan_inference_placement(recipe: Recipe) -> InferencePlacementPlan:
    """Place every role that takes part.

    Mode defer: the roles take turns on one pool, so each one begins at bundle 0. Mode split: the
    inference roles are side by side in one pool, models one after another. Mode decoupled: each
    role has a pool. A layout script says it phase by phase instead.

    Raises:
        PlacementError: with every violation, those of rules that have nothing to do with placement
            among them, and what their cures would uncover behind them.
    """
    made, violations = _looked_at(recipe)
    if made is None:
        found = with_uncovered(recipe, violations, lambda cured: _looked_at(cured)[1])
        subject = "used" if broken_rules(recipe) else "placed"
        raise PlacementError(found, f"the recipe cannot be {subject}")
    return made


def _looked_at(recipe: Recipe) -> tuple[InferencePlacementPlan | None, list[Violation]]:
    """The plan, or every violation that can be told of the recipe as it is."""
    violations = broken_rules(recipe)
    demands, training = inference_demands(recipe), training_demands(recipe)
    violations += role_violations(recipe, demands) + unused_layout(recipe)
    violations += transport_violations(recipe, demands)
    for demand in demands:
        violations += engine_violations(demand, recipe.cluster.gpus_per_node)
    if absurd := size_violations(recipe, demands, training):
        return None, [*violations, *absurd]  # nothing of that size is laid out
    made = arrange(recipe, demands, training)
    violations += made.violations
    violations += autoscale_violations(recipe, demands, sum(made.pools.values()))
    claims = _claims(made, demands)
    violations += share_violations(claims, made.pools)
    if violations:
        return None, violations
    computed = computed_shares(claims, made.pools)
    placements = [
        replace(p, ray_gpu_fraction=computed[p.pool]) if d.engine.ray_gpu_fraction == "auto" else p
        for p, d in zip(made.placements, demands, strict=True)
    ]
    plan = InferencePlacementPlan(
        mode=made.mode,
        placements=tuple(placements),
        total_required_gpus=sum(made.pools.values()),
        pool_sizes=tuple(made.pools.items()),
        gpus_per_node=recipe.cluster.gpus_per_node or recipe.cluster.gpus,
        training=tuple(made.training),
        phases=phases_of(made.turns, placements, made.training),
    )
    return plan, []


def _claims(made: Arrangement, demands: Sequence[Demand]) -> list[Claim]:
    """Reservations of every training rank and of every engine's worker."""
    claims = [
        Claim(
            t.role,
            t.pool,
            range(t.bundle_start, t.bundle_stop),
            t.ray_gpu_fraction,
            _SHARE_FIELDS[t.role],
        )
        for t in made.training
    ]
    for placement, demand in zip(made.placements, demands, strict=False):
        share = demand.engine.ray_gpu_fraction
        claims.append(
            Claim(
                f"{placement.role}/{placement.model_id}",
                placement.pool,
                placement.heads,
                None if share == "auto" else share,
                f"{demand.engine_field}.ray_gpu_fraction",
            )
        )
    return claims
