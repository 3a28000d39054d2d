"""A plan's pools of GPUs as Ray gives them: detached placement groups, probed bundle by bundle."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement.placed import POOL, InferencePlacementPlan, PlacementError
from relax_infer.placement.pools import (
    LEAST,
    answered,
    asked,
    find_pool,
    pool_name,
    remove_groups,
)
from relax_infer.placement.probes import probe_bundles
from relax_infer.placement.ray_view import group_table, is_detached, living_nodes
from relax_infer.placement.room import NEEDS, node_of_each, shortage_of
from relax_infer.placement.shapes import in_need
from relax_infer.placement.topology import validate_bound_plan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

Strategy = Literal["PACK", "STRICT_PACK"]
Bundle = Mapping[str, float]
"""What Ray reserves for one: resource → amount."""
Check = Callable[[list[BundleBinding]], Awaitable[None]]
Tell = Callable[[str], object]
Rows = dict[str, list[BundleBinding]]
"""By pool."""
Made = list["asyncio.Future[PlacementGroup]"]
"""Groups that this call has asked Ray for; some of them may not be there yet."""

_POLL = 0.1
_LOOK = 1.0
"""Seconds between looks at whether the cluster can still fit what it was asked for."""
_SETTLES = 3
"""Looks for what was just given back to be free."""
OF_A_NODE = 0.001
"""Share of the resource ``node:<address>`` that every node of Ray has 1 of: asks for the node."""
_GIVEN_BACK = 60.0
"""Seconds at most for Ray to remove the groups of a binding that failed."""
_late: set["asyncio.Future[None]"] = set()
"""Removals of groups that Ray has not made yet."""


async def bind_plan(
    run: str,
    plan: InferencePlacementPlan,
    timeout: float,
    tell: Tell | None = None,
) -> dict[str, list[BundleBinding]]:
    """Make or find every pool of a plan, and prove that the devices fit the plan.

    Args:
        run: run id.
        plan: each of its pools is a detached placement group of one GPU and one CPU per bundle.
        timeout: seconds for everything.
        tell: is told, again and again, whose GPUs are waited for, and for how long at most.

    Returns:
        For each pool one row per bundle, in the order that the plan counts in.

    Raises:
        PlacementError: the devices do not fit the plan; with every violation.
        PermanentError: the cluster is too small, or the run has a pool of another size.
        TransientError: the cluster is large enough but busy, or did not answer in time, or lost a
            node meanwhile.

    A pool that was there before is adopted. Whatever fails, the groups that this call made are
    removed again, and no others.

    Ray chooses the nodes, pool after pool, those first that need the most of a node. Where an
    engine does not fit what it chose and a spread is known that every engine fits, the pools are
    asked for once more, each bundle on its node.
    """
    sizes = dict(plan.pool_sizes)
    wanted: dict[str, Sequence[Bundle]] = {pool: alike(sizes[pool]) for pool in in_need(plan)}

    async def fits(pools: Rows) -> None:
        validate_bound_plan(plan, pools)

    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        rows = await _bind(run, wanted, timeout, check=fits, tell=tell)
    except PlacementError:
        there = [await asked(find_pool, run, pool) for pool in sizes]
        pinned = None if any(there) else await _pinned(plan)
        left = timeout - (loop.time() - begun)
        if pinned is None or left <= 0:
            raise
        again = {pool: pinned[pool] for pool in wanted}
        rows = await _bind(run, again, left, check=fits, tell=tell)
    return {pool: rows[pool] for pool in sizes}


async def _pinned(plan: InferencePlacementPlan) -> dict[str, list[Bundle]] | None:
    """The plan's bundles, each on a node of its own choice, where there is a legal spread of what
    is free. Waits a moment: Ray tells what was just given back a little later."""
    for _ in range(_SETTLES):
        nodes = await asked(living_nodes)
        if chosen := await asyncio.to_thread(node_of_each, plan, nodes):
            return {
                pool: [{**NEEDS, f"node:{node.node_ip}": OF_A_NODE} for node in mine]
                for pool, mine in chosen.items()
            }
        await asyncio.sleep(_LOOK)
    return None


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

    async def fits(pools: Rows) -> None:
        if check is not None:
            await check(pools[pool])

    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise PermanentError(
            f"{pool_name(run, pool)} cannot be of {gpus!r} GPUs.",
            cure="Bind a pool of a whole number of GPUs from 1.",
        )
    return (await _bind(run, {pool: alike(gpus)}, timeout, strategy, fits))[pool]


async def bind_bundles(
    run: str, pool: str, bundles: Sequence[Bundle], timeout: float
) -> "tuple[PlacementGroup, list[BundleBinding]]":
    """One pool of just these bundles, or the one that is there; with one row for each. Which
    devices they are is for the caller to look at. Raises as :func:`bind_plan` does."""
    pools = await _bind(run, {pool: bundles}, timeout)
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
    check: Callable[[Rows], Awaitable[None]] | None = None,
    tell: Tell | None = None,
) -> Rows:
    """Rows of every pool, once ``check`` is content with them."""
    known = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not known or not (math.isfinite(timeout) and timeout > 0):
        raise PermanentError(
            f"bind timeout {timeout!r} is not a finite positive number of seconds.",
            cure="Set cluster.bind_timeout to one.",
        )
    deadline = asyncio.get_running_loop().time() + timeout
    made: Made = []
    try:
        groups = await _make_or_find(run, wanted, made, strategy, deadline)
        for pool, group in groups.items():
            await _placed(run, pool, group, wanted, deadline, strategy, tell)
        probes = (_probe(pool_name(run, p), group, deadline) for p, group in groups.items())
        found = dict(zip(groups, await _all_or_none(probes), strict=True))
        await _known(run, found, deadline)
        rows = {pool: in_order(mine) for pool, mine in found.items()}
        if check is not None:
            await check(rows)
    except BaseException as error:
        try:
            await asyncio.shield(_give_back(made, deadline))
        except TransientError as left:
            error.add_note(f"Its placement groups may be left: {left}")
        raise
    return rows


def in_order(rows: list[BundleBinding]) -> list[BundleBinding]:
    """The order that plans count in: whole nodes before nodes of which there is a part only.

    Ray's bundle numbers say nothing about nodes; a plan begins an engine over nodes at a multiple.
    """
    there: dict[str, int] = {}
    for row in rows:
        there[row.node_id] = there.get(row.node_id, 0) + 1
    return sorted(rows, key=lambda r: (-there[r.node_id], r.node_id, r.gpu_id))


async def _make_or_find(
    run: str,
    wanted: Mapping[str, Sequence[Bundle]],
    made: Made,
    strategy: Strategy,
    deadline: float,
) -> "dict[str, PlacementGroup]":
    """A group for each pool; ``made`` gets those that were not there."""
    from ray.exceptions import RaySystemError
    from ray.util.placement_group import placement_group

    sizes = {pool: len(bundles) for pool, bundles in wanted.items()}
    found = {pool: await asked(find_pool, run, pool, deadline=deadline) for pool in sizes}
    for pool, group in found.items():
        if group is not None:
            identity = group.id.hex()
            table = await asked(group_table, deadline=deadline)
            lasts = await asked(is_detached, identity, deadline=deadline)
            _adopt(run, pool, group, sizes[pool], table[identity], lasts)
    if None in found.values():
        lacking = await asked(_lacks, wanted.values(), strategy, True, deadline=deadline)
        if lacking:
            raise PermanentError(
                f"run {run} needs {_told(sizes)}: {lacking}",
                cure="Add nodes, or lower cluster.gpus in the recipe.",
            )
    groups: dict[str, PlacementGroup] = {}
    for pool, group in found.items():
        if group is None:
            bundles = [dict(bundle) for bundle in wanted[pool]]
            name = pool_name(run, pool)
            ask = asyncio.to_thread(placement_group, bundles, strategy, name, "detached")
            made.append(making := asyncio.ensure_future(ask))
            try:
                # Ray's call goes on when nobody waits for it any more: `made` has what it makes.
                group = await answered(asyncio.shield(making), deadline)
            except RaySystemError as error:  # Ray has one group of a name
                group = await asked(find_pool, run, pool, deadline=deadline)
                if group is None:
                    raise TransientError(f"Ray did not make {name}: {error}") from error
        groups[pool] = group
    return groups


def _adopt(
    run: str,
    pool: str,
    group: "PlacementGroup",
    gpus: int,
    entry: Mapping[str, Any],
    lasts: bool | None,
) -> None:
    """
    Args:
        lasts: whether it is detached; None: Ray does not tell.

    Raises:
        PermanentError: it is no pool of ``gpus`` bundles.
    """
    name = pool_name(run, pool)
    if group.bundle_count != gpus:
        raise PermanentError(
            f"run {run} has a pool of {counted(group.bundle_count, 'GPU')}, its recipe says"
            f" {gpus}.",
            cure="Choose another run id, or end the run first.",
        )
    for number, bundle in entry["bundles"].items():
        # More GPUs would hide devices that no engine of the plan is given, more CPUs count nowhere.
        if any(bundle.get(kind, 0) != amount for kind, amount in NEEDS.items()):
            raise PermanentError(
                f"bundle {number} of placement group {name} is {bundle}, not one GPU and one CPU.",
                cure="Remove that placement group, or choose another run id.",
            )
    if lasts is False:
        raise PermanentError(
            f"placement group {name} is not detached: it would go with the process that made it.",
            cure='Make it anew with lifetime="detached", or choose another run id.',
        )


async def _placed(
    run: str,
    pool: str,
    group: "PlacementGroup",
    wanted: Mapping[str, Sequence[Bundle]],
    deadline: float,
    strategy: Strategy = "PACK",
    tell: Tell | None = None,
) -> None:
    """Wait for Ray to reserve the bundles; say what is missing if they cannot come or are late."""
    identity, loop = group.id.hex(), asyncio.get_running_loop()
    name = pool_name(run, pool)
    sizes = {each: len(bundles) for each, bundles in wanted.items()}
    look = loop.time() + _LOOK
    while True:
        table = await asked(group_table, deadline=deadline)
        state = table.get(identity, {}).get("state", "REMOVED")
        if state == "CREATED":
            return
        if state == "REMOVED":
            raise TransientError(f"{name} was removed while it was being placed.")
        if loop.time() > look:
            look = loop.time() + _LOOK
            if lacking := await asked(_lacks, wanted.values(), strategy, True, deadline=deadline):
                raise TransientError(
                    f"Ray could not place the pools of run {run} ({_told(sizes)}): the cluster has"
                    f" become too small. {lacking}",
                    cure="A node was lost: look at `ray status`.",
                )
            if tell is not None:
                left = max(0.0, deadline - loop.time())
                lacking = await asked(_lacks, [wanted[pool]], strategy, False, deadline=deadline)
                tell(f"waits up to {left:.0f} s more: {lacking or 'Ray is placing it'}")
        if loop.time() > deadline:
            lacking = await asked(_lacks, [wanted[pool]], strategy, False, deadline=deadline)
            raise PermanentError(
                f"Ray could not place {name} in time, it is {state}:"
                f" {lacking or 'there would be room by now.'}",
                cure="Wait for those who hold the GPUs or end them (relax-infer stop); raise"
                " cluster.bind_timeout to wait longer.",
            )
        await asyncio.sleep(_POLL)


def _lacks(pools: Iterable[Sequence[Bundle]], strategy: Strategy, ever: bool) -> str | None:
    nodes = [node.idle() if ever else node for node in living_nodes()]
    return shortage_of(pools, nodes, on_one_node=strategy == "STRICT_PACK")


async def _probe(name: str, group: "PlacementGroup", deadline: float) -> list[BundleBinding]:
    entry = (await asked(group_table, deadline=deadline))[group.id.hex()]
    nodes = {int(k): node for k, node in entry["bundles_to_node_id"].items()}
    return await probe_bundles(group, name, nodes, deadline)


async def _all_or_none(probes: Iterable[Coroutine[Any, Any, list[BundleBinding]]]) -> list[Any]:
    """Their answers; once one fails the others end too, with the actors that they have."""
    asking = [asyncio.ensure_future(probe) for probe in probes]
    try:
        return await asyncio.gather(*asking)
    finally:
        for probe in asking:
            probe.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _known(run: str, pools: Rows, deadline: float) -> None:
    """
    Raises:
        TransientError: a bundle is on a node that the cluster does not have any more.
    """
    there = {node.node_id for node in await asked(living_nodes, deadline=deadline)}
    for pool, rows in pools.items():
        lost = {row.node_id or "a node without identity" for row in rows} - there
        if lost:
            raise TransientError(
                f"{pool_name(run, pool)} has bundles on {', '.join(sorted(lost))}, which is not a"
                " living node of the cluster.",
                cure="A node was lost: look at `ray status`.",
            )


async def _give_back(made: Made, deadline: float) -> None:
    """Remove the groups, also one that Ray is still making: that one when it is there, if it takes
    longer than the binding may."""
    if not made:
        return
    left = min(_GIVEN_BACK, max(LEAST, deadline - asyncio.get_running_loop().time()))
    done, late = await asyncio.wait(made, timeout=left)
    for making in late:
        removal = asyncio.ensure_future(_removed([making], _GIVEN_BACK))
        _late.add(removal)
        removal.add_done_callback(_late.discard)
    await _removed(done, left)


async def _removed(made: "Iterable[asyncio.Future[PlacementGroup]]", timeout: float) -> None:
    groups = await asyncio.gather(*made, return_exceptions=True)
    mine = {group.id.hex() for group in groups if not isinstance(group, BaseException)}
    if mine:
        await remove_groups(lambda identity, entry: identity in mine, timeout=timeout)


def _told(sizes: Mapping[str, int]) -> str:
    total = counted(sum(sizes.values()), "GPU")
    if len(sizes) == 1:
        return total
    return f"{total} ({', '.join(f'{pool}={size}' for pool, size in sizes.items())})"
