"""A plan's pools of GPUs as Ray gives them: detached placement groups, probed bundle by bundle."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement.placed import POOL, InferencePlacementPlan
from relax_infer.placement.pools import asked, find_pool, pool_name, remove_groups
from relax_infer.placement.probes import probe_bundles
from relax_infer.placement.ray_view import group_table, living_nodes
from relax_infer.placement.room import NEEDS, shortage
from relax_infer.placement.topology import validate_bound_plan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Strategy = Literal["PACK", "STRICT_PACK"]
Bundle = Mapping[str, float]
"""What Ray reserves for one: resource → amount."""
Check = Callable[[list[BundleBinding]], Awaitable[None]]

_POLL = 0.1
_LOOK = 1.0
"""Seconds between looks at whether the cluster can still fit what it was asked for."""


async def bind_plan(
    run: str, plan: InferencePlacementPlan, timeout: float
) -> dict[str, list[BundleBinding]]:
    """Make or find every pool of a plan, and prove that the devices fit the plan.

    Args:
        run: run id.
        plan: each of its pools is a detached placement group of one GPU and one CPU per bundle.
        timeout: seconds for everything.

    Returns:
        For each pool one row per bundle, in the order that the plan counts in.

    Raises:
        PlacementError: the devices do not fit the plan; with every violation.
        PermanentError: the cluster is too small, or the run has a pool of another size.
        TransientError: the cluster is large enough but busy, or did not answer in time, or lost a
            node meanwhile.

    A pool that was there before is adopted. Whatever fails, the groups that this call made are
    removed again, and no others.
    """
    wanted = {pool: alike(size) for pool, size in dict(plan.pool_sizes).items()}
    pools, made = await _bind(run, wanted, timeout)
    try:
        validate_bound_plan(plan, pools)
    except BaseException:
        await asyncio.shield(_give_back(made))
        raise
    return pools


async def bind_pool(
    run: str,
    gpus: int,
    timeout: float,
    *,
    pool: str = POOL,
    strategy: Strategy = "PACK",
    check: Check | None = None,
) -> list[BundleBinding]:
    """The same for one pool of which no plan is known.

    Args:
        strategy: ``STRICT_PACK`` has all of it on one node.
        check: raises where the devices do not fit; then the pool is given back if it is new.

    Returns:
        One row per bundle, node by node (the one with the most bundles first) and GPU by GPU;
        ``bundle`` is Ray's own index.
    """
    pools, made = await _bind(run, {pool: alike(gpus)}, timeout, strategy)
    try:
        if check is not None:
            await check(pools[pool])
    except BaseException:
        await asyncio.shield(_give_back(made))
        raise
    return pools[pool]


async def bind_bundles(
    run: str, pool: str, bundles: Sequence[Bundle], timeout: float
) -> "tuple[PlacementGroup, list[BundleBinding]]":
    """One pool of just these bundles, or the one that is there; with one row for each. Which
    devices they are is for the caller to look at. Raises as :func:`bind_plan` does."""
    pools, _ = await _bind(run, {pool: bundles}, timeout)
    group = await asked(find_pool, run, pool)
    if group is None:
        raise TransientError(f"{pool_name(run, pool)} was removed while it was being placed.")
    return group, pools[pool]


def alike(gpus: int) -> list[Bundle]:
    """Bundles of one GPU, wherever Ray finds them."""
    return [NEEDS] * gpus


async def _bind(
    run: str,
    wanted: Mapping[str, Sequence[Bundle]],
    timeout: float,
    strategy: Strategy = "PACK",
) -> "tuple[dict[str, list[BundleBinding]], list[PlacementGroup]]":
    """Rows of every pool, and the groups that were made for it."""
    if isinstance(timeout, bool) or not (math.isfinite(timeout) and timeout > 0):
        raise PermanentError(
            f"bind timeout {timeout!r} is not a finite positive number of seconds.",
            cure="Set cluster.bind_timeout to one.",
        )
    deadline = asyncio.get_running_loop().time() + timeout
    sizes = {pool: len(bundles) for pool, bundles in wanted.items()}
    made: list[PlacementGroup] = []
    try:
        groups = await _make_or_find(run, wanted, made, strategy)
        for pool, group in groups.items():
            await _placed(run, pool_name(run, pool), group, sizes, deadline)
        probes = (_probe(pool_name(run, p), group, deadline) for p, group in groups.items())
        rows = dict(zip(groups, await asyncio.gather(*probes), strict=True))
        await _known(run, rows)
    except BaseException:
        await asyncio.shield(_give_back(made))
        raise
    return {pool: in_order(found) for pool, found in rows.items()}, made


def in_order(rows: list[BundleBinding]) -> list[BundleBinding]:
    """The order that plans count in: whole nodes before nodes of which there is a part only.

    Ray's own bundle numbers say nothing about nodes, and a plan begins an engine over nodes at a
    multiple of a node's GPUs.
    """
    there: dict[str, int] = {}
    for row in rows:
        there[row.node_id] = there.get(row.node_id, 0) + 1
    return sorted(rows, key=lambda r: (-there[r.node_id], r.node_id, r.gpu_id))


async def _make_or_find(
    run: str,
    wanted: Mapping[str, Sequence[Bundle]],
    made: "list[PlacementGroup]",
    strategy: Strategy,
) -> "dict[str, PlacementGroup]":
    """A group for each pool; ``made`` gets those that were not there."""
    from ray.exceptions import RaySystemError
    from ray.util.placement_group import placement_group

    sizes = {pool: len(bundles) for pool, bundles in wanted.items()}
    found = {pool: await asked(find_pool, run, pool) for pool in sizes}
    for pool, group in found.items():
        if group is not None:
            _adopt(run, pool, group, sizes[pool], (await asked(group_table))[group.id.hex()])
    if None in found.values() and (lacking := await asked(_never_fits, sizes)):
        raise PermanentError(
            f"run {run} needs {_told(sizes)}: {lacking}",
            cure="Add nodes, or lower cluster.gpus in the recipe.",
        )
    groups: dict[str, PlacementGroup] = {}
    for pool, group in found.items():
        if group is None:
            bundles = [dict(bundle) for bundle in wanted[pool]]
            name = pool_name(run, pool)
            try:
                group = await asked(placement_group, bundles, strategy, name, "detached")
                made.append(group)
            except RaySystemError as error:  # Ray has one group of a name
                group = await asked(find_pool, run, pool)
                if group is None:
                    raise TransientError(f"Ray did not make {name}: {error}") from error
        groups[pool] = group
    return groups


def _adopt(
    run: str, pool: str, group: "PlacementGroup", gpus: int, entry: Mapping[str, Any]
) -> None:
    """
    Raises:
        PermanentError: it is no pool of ``gpus`` bundles.
    """
    if group.bundle_count != gpus:
        raise PermanentError(
            f"run {run} has a pool of {group.bundle_count} GPUs, its recipe says {gpus}.",
            cure="Choose another run id, or end the run first.",
        )
    for number, bundle in entry["bundles"].items():
        if any(bundle.get(kind, 0) < amount for kind, amount in NEEDS.items()):
            raise PermanentError(
                f"bundle {number} of placement group {pool_name(run, pool)} is {bundle}, not one"
                " GPU and one CPU.",
                cure="Remove that placement group, or choose another run id.",
            )


async def _placed(
    run: str, name: str, group: "PlacementGroup", sizes: Mapping[str, int], deadline: float
) -> None:
    """Wait for Ray to reserve the bundles; say what is missing if they cannot come or are late."""
    identity, loop = group.id.hex(), asyncio.get_running_loop()
    look = loop.time() + _LOOK
    while True:
        state = (await asked(group_table)).get(identity, {}).get("state", "REMOVED")
        if state == "CREATED":
            return
        if state == "REMOVED":
            raise TransientError(f"{name} was removed while it was being placed.")
        if loop.time() > look:
            look = loop.time() + _LOOK
            if lacking := await asked(_never_fits, sizes):
                raise TransientError(
                    f"Ray could not place the pools of run {run} ({_told(sizes)}): the cluster has"
                    f" become too small. {lacking}",
                    cure="A node was lost: look at `ray status`.",
                )
        if loop.time() > deadline:
            lacking = shortage(group.bundle_count, await asked(living_nodes))
            raise PermanentError(
                f"Ray could not place {name} in time, it is {state}:"
                f" {lacking or 'there would be room by now.'}",
                cure="Wait for those who hold the GPUs or end them (relax-infer stop); raise"
                " cluster.bind_timeout to wait longer.",
            )
        await asyncio.sleep(_POLL)


def _never_fits(sizes: Mapping[str, int]) -> str | None:
    return shortage(sum(sizes.values()), [node.idle() for node in living_nodes()])


async def _probe(name: str, group: "PlacementGroup", deadline: float) -> list[BundleBinding]:
    entry = (await asked(group_table))[group.id.hex()]
    nodes = {int(k): node for k, node in entry["bundles_to_node_id"].items()}
    return await probe_bundles(group, name, nodes, deadline)


async def _known(run: str, pools: Mapping[str, list[BundleBinding]]) -> None:
    """
    Raises:
        TransientError: a bundle is on a node that the cluster does not have any more.
    """
    there = {node.node_id for node in await asked(living_nodes)}
    for pool, rows in pools.items():
        lost = {row.node_id for row in rows} - there
        if lost:
            raise TransientError(
                f"{pool_name(run, pool)} has bundles on {', '.join(sorted(lost))}, which is not a"
                " living node of the cluster.",
                cure="A node was lost: look at `ray status`.",
            )


async def _give_back(groups: "list[PlacementGroup]") -> None:
    mine = {group.id.hex() for group in groups}
    if mine:
        await remove_groups(lambda identity, entry: identity in mine, timeout=60.0)


def _told(sizes: Mapping[str, int]) -> str:
    total = f"{sum(sizes.values())} GPUs"
    if len(sizes) == 1:
        return total
    return f"{total} ({', '.join(f'{pool}={size}' for pool, size in sizes.items())})"
