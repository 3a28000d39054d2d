"""A pool that Ray has lost, made again on the devices that it was bound to.

Ray chooses the GPU of a bundle itself, among the free ones of the node. So each bundle asks for its
node, and what is free there beside the pool's own devices is held by spacers until it has them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import TransientError
from relax_infer.placement.binding import bind_bundles
from relax_infer.placement.pools import asked, pool_name, remove_groups
from relax_infer.placement.probes import probe_bundles
from relax_infer.placement.ray_view import group_table, living_nodes
from relax_infer.placement.room import NEEDS

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_OF_A_NODE = 0.001
"""Share of the resource ``node:<address>`` that every node of Ray has 1 of: asks for the node."""
_TRIES = 3
"""Others may take or give back GPUs while the spacers are set."""
_SETTLES = 1.0
"""Seconds until Ray's nodes have told what is free again."""
_POLL = 0.1


async def make_again(
    run: str, pool: str, bound: Sequence[BundleBinding], timeout: float
) -> "tuple[PlacementGroup, list[BundleBinding]]":
    """The pool with one row per bundle: on the devices of ``bound`` where they are free, on others
    of the same nodes where they are not.

    Raises:
        TransientError: a node is not there, or Ray did not answer or place it in time.
        PermanentError: others hold too many of the GPUs; they are named.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    await _nodes_are_there(run, pool, bound)
    bundles = [{**NEEDS, **_node(row.node_ip)} for row in sorted(bound, key=lambda r: r.bundle)]
    group, rows = await bind_bundles(run, pool, bundles, timeout)
    for _ in range(_TRIES):
        if devices(rows) == devices(bound):
            break
        await _remove([group])
        await asyncio.sleep(_SETTLES)
        async with _spacers(bound, deadline):
            left = max(_SETTLES, deadline - loop.time())
            group, rows = await bind_bundles(run, pool, bundles, left)
    return group, rows


def devices(rows: Iterable[BundleBinding]) -> Counter[str]:
    """What is the same before and after Ray was restarted, which numbers its nodes anew."""
    return Counter(row.gpu_uuid or f"{row.node_ip}/{row.gpu_id}" for row in rows)


@asynccontextmanager
async def only_one(run: str, pool: str, timeout: float) -> AsyncIterator[None]:
    """Nobody else of the cluster makes this pool again meanwhile: a group of one name, which goes
    with the process that has it, is the lock.

    Raises:
        TransientError: somebody else had it for ``timeout`` seconds.
    """
    from ray.exceptions import RaySystemError
    from ray.util.placement_group import placement_group

    name = f"{pool_name(run, pool)}.again"
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            held = await asked(placement_group, [{"CPU": 0.001}], "PACK", name)
            break
        except RaySystemError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise TransientError(f"{name} is held by another worker: {error}") from error
            await asyncio.sleep(_POLL)
    try:
        yield
    finally:
        await asyncio.shield(_remove([held]))


@asynccontextmanager
async def _spacers(bound: Sequence[BundleBinding], deadline: float) -> AsyncIterator[None]:
    """Every GPU that is free on the nodes of ``bound`` is held, but for its own devices."""
    from ray.util.placement_group import placement_group

    wanted = devices(bound)
    made: list[PlacementGroup] = []
    try:
        for address in sorted({row.node_ip for row in bound}):
            free = await _free_gpus(address)
            for _ in range(free):
                bundle = {"GPU": NEEDS["GPU"], **_node(address)}
                made.append(await asked(placement_group, [bundle], "PACK", ""))
        for group in list(made):
            if devices(await _rows(group, deadline)) & wanted:
                await _remove([group])
                made.remove(group)
        yield
    finally:
        await asyncio.shield(_remove(made))


async def _rows(group: "PlacementGroup", deadline: float) -> list[BundleBinding]:
    """None where somebody else was faster."""
    name, identity = "a spacer", group.id.hex()
    while (await asked(group_table)).get(identity, {}).get("state") != "CREATED":
        if asyncio.get_running_loop().time() > deadline:
            return []
        await asyncio.sleep(_POLL)
    return await probe_bundles(group, name, {}, deadline)


async def _free_gpus(address: str) -> int:
    return int(sum(n.free_gpus for n in await asked(living_nodes) if n.node_ip == address))


async def _nodes_are_there(run: str, pool: str, bound: Sequence[BundleBinding]) -> None:
    there = {node.node_ip for node in await asked(living_nodes)}
    if missing := sorted({row.node_ip for row in bound} - there):
        raise TransientError(
            f"{pool_name(run, pool)} was bound on {', '.join(missing)}, which Ray does not have.",
            cure="Bring the node back: look at `ray status`.",
        )


async def _remove(groups: "Iterable[PlacementGroup]") -> None:
    mine = {group.id.hex() for group in groups}
    if mine:
        await remove_groups(lambda identity, entry: identity in mine, timeout=60.0)


def _node(address: str) -> dict[str, float]:
    return {f"node:{address}": _OF_A_NODE}
