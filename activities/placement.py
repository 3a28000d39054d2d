"""The placement group of a run."""

from temporalio import activity

from activities._run_files import recipe_of
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import Binding, RunPlan
from relax_infer.placement import bind_pool, release_pool


@activity.defn
async def bind_placement(plan: RunPlan) -> Binding:
    """The cluster's GPUs, bound to the plan's groups; a placement that is there is used again."""
    cluster = recipe_of(plan.run).cluster
    rows = await bind_pool(plan.run.run, cluster.gpus, cluster.bind_timeout)
    groups = tuple(g.model_copy(update={"bundles": _slice(g, rows)}) for g in plan.groups)
    trainer = plan.trainer.model_copy(update={"bundles": tuple(rows[: plan.trainer.ranks])})
    bound = plan.model_copy(update={"groups": groups, "trainer": trainer})
    return Binding(placement_group=plan.trainer.placement_group, plan=bound)


def _slice(group: EngineGroupSpec, rows: list[BundleBinding]) -> tuple[BundleBinding, ...]:
    """In defer every role begins at the first bundle."""
    return tuple(rows[: group.replicas * group.gpus_per_replica])


@activity.defn
async def release_placement(run: RunRef) -> RunRef:
    """The run's placement group is removed."""
    await release_pool(run.run)
    return run


ACTIVITIES = (bind_placement, release_placement)
