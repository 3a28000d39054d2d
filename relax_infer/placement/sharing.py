"""Which roles of a plan use a GPU in common."""

from itertools import combinations

from relax_infer.placement.placed import InferencePlacementPlan


def roles_apart(plan: InferencePlacementPlan) -> tuple[tuple[str, str], ...]:
    """Pairs of roles that share no bundle in any phase: they may hold theirs at the same time.

    Returns:
        Each pair once, the role that is placed first before the other.
    """
    used: dict[str, set[tuple[str, int]]] = {}
    for slot in [*plan.placements, *plan.training]:
        bundles = {(slot.pool, k) for k in range(slot.bundle_start, slot.bundle_stop)}
        used.setdefault(slot.role, set()).update(bundles)
    return tuple((a, b) for a, b in combinations(used, 2) if not used[a] & used[b])
