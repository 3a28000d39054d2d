"""The placement groups of a run."""

from collections.abc import Mapping

from temporalio import activity

from activities._progress import teller
from activities._run_files import recipe_of
from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import Binding, RunPlan
from relax_infer.engines.orphans import need_free_devices
from relax_infer.placement import (
    InferencePlacementPlan,
    bind_plan,
    model_placement,
    plan_inference_placement,
)
from relax_infer.placement.standing import keep_pools, let_go_of_pools


@activity.defn
async def bind_placement(plan: RunPlan) -> Binding:
    """The cluster's GPUs, bound to the plan's groups; a placement that is there is used again.
    Refused while an engine of another run may hold one of them, and where they do not fit the
    plan."""
    recipe = recipe_of(plan.run)
    placed = plan_inference_placement(recipe)
    tell = teller()
    pools = await bind_plan(plan.run.run, placed, recipe.cluster.bind_timeout, tell)
    tell()
    await need_free_devices(plan.run, [row for pool in pools.values() for row in pool])
    groups = tuple(
        g.model_copy(update={"bundles": bundles_of(g, _rows_of(g, placed, pools))})
        for g in plan.groups
    )
    (trained,) = [t for t in placed.training if t.role == "trainer"]
    rows = pools[trained.pool][trained.bundle_start : trained.bundle_stop]
    trainer = plan.trainer.model_copy(update={"bundles": tuple(rows)})
    await keep_pools(plan.run, pools)
    bound = plan.model_copy(update={"groups": groups, "trainer": trainer})
    return Binding(
        placement_group=plan.trainer.placement_group, plan=bound, placement=placed.to_dict()
    )


def _rows_of(
    group: EngineGroupSpec,
    placed: InferencePlacementPlan,
    pools: Mapping[str, list[BundleBinding]],
) -> list[BundleBinding]:
    placement = model_placement(placed, group.role, group.model)
    assert placement is not None
    return pools[placement.pool][placement.bundle_start : placement.bundle_stop]


def bundles_of(group: EngineGroupSpec, rows: list[BundleBinding]) -> tuple[BundleBinding, ...]:
    """Of the rows where the plan has the group, those that its replicas use.

    Raises:
        PermanentError: Ray gave a replica GPUs on other nodes than its parts are meant for.
    """
    bound = group.model_copy(
        update={"bundles": tuple(rows[: group.replicas * group.gpus_per_replica])}
    )
    for replica in range(group.replicas):
        require_whole_nodes(bound, replica)
    return bound.bundles


def require_whole_nodes(group: EngineGroupSpec, replica: int) -> None:
    """
    Raises:
        PermanentError: Ray gave the replica GPUs on other nodes than its parts are meant for.
    """
    shares = [group.node_bundles(replica, n) for n in range(group.nodes_per_replica)]
    nodes = [sorted({bundle.node_ip for bundle in share}) for share in shares]
    apart = {share[0].node_id for share in shares}
    if any(len({b.node_id for b in share}) > 1 for share in shares) or len(apart) < len(shares):
        raise PermanentError(
            f"run {group.run}: {group.engine_id(replica)} needs"
            f" {counted(group.gpus_per_node, 'GPU')} on each of"
            f" {counted(group.nodes_per_replica, 'node')}; the pool has them on {nodes}.",
            cure="Choose sizes that fill whole nodes of the cluster, or free its nodes.",
        )


@activity.defn
async def release_placement(run: RunRef) -> RunRef:
    """Every placement group of the run is removed; nobody makes one again."""
    await let_go_of_pools(run)
    return run


ACTIVITIES = (bind_placement, release_placement)
