"""The GPUs of replicas that are added to a group, and the wait for those that are to go."""

import asyncio

from temporalio import activity

from activities.placement import require_whole_nodes
from relax_infer.contracts.engines import AddedReplica, BundleBinding
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.scale import (
    DrainAnswer,
    DrainAsk,
    PlacementAnswer,
    PlacementAsk,
    ScaleFailure,
    added_pool,
)
from relax_infer.engines import EngineGroup
from relax_infer.engines.orphans import need_free_devices
from relax_infer.placement import bind_pool
from relax_infer.placement.standing import keep_pools, let_go_of_pool


@activity.defn
async def bind_added_replica(ask: PlacementAsk) -> PlacementAnswer:
    """A placement group for one replica; one that is there is used again. Where the cluster has no
    room in time, or the GPUs are not fit, none is left."""
    group, pool = ask.group, added_pool(ask.group, ask.replica)

    def placed(rows: list[BundleBinding]) -> AddedReplica:
        return AddedReplica(replica=ask.replica, placement_group=pool, bundles=tuple(rows))

    async def check(rows: list[BundleBinding]) -> None:
        require_whole_nodes(group.with_added(placed(rows)), ask.replica)
        await need_free_devices(ask.run, rows)

    clock = asyncio.get_running_loop().time
    deadline = clock() + ask.timeout
    try:
        rows = await bind_pool(
            ask.run.run,
            group.gpus_per_replica,
            ask.timeout,
            pool=pool,
            strategy="STRICT_PACK" if group.nodes_per_replica == 1 else "PACK",
            check=check,
        )
    except PermanentError as error:
        late = clock() >= deadline
        failure = ScaleFailure.PROVISION_TIMEOUT if late else ScaleFailure.PROVISION_FAILED
        return PlacementAnswer(failure=failure, why=str(error))
    await keep_pools(ask.run, {pool: rows})
    return PlacementAnswer(placement=placed(rows))


@activity.defn
async def release_added_replica(ask: PlacementAsk) -> PlacementAnswer:
    """Remove the replica's placement group, with every actor in it; nothing if there is none."""
    await let_go_of_pool(ask.run, added_pool(ask.group, ask.replica), ask.timeout)
    return PlacementAnswer()


@activity.defn
async def drain_engine(ask: DrainAsk) -> DrainAnswer:
    """Wait until a replica that nobody calls any more has answered what it admitted."""
    return DrainAnswer(left=await EngineGroup(ask.group).wait_idle(ask.replica, ask.timeout))


ACTIVITIES = (bind_added_replica, release_added_replica, drain_engine)
