"""A pool that Ray has lost, made again on the devices that it was bound to, or not at all.

Ray chooses the GPU of a bundle itself, among the free ones of the node. So each bundle asks for its
node, and what is free there beside the pool's own devices is held by spacers until it has them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import TransientError
from relax_infer.placement.binding import OF_A_NODE, bind_bundles
from relax_infer.placement.pools import asked, pool_name, remove_groups
from relax_infer.placement.probes import probe_bundles
from relax_infer.placement.ray_view import group_table, living_nodes
from relax_infer.placement.room import NEEDS

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_LOCK = "relax.again"
_ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""Nothing that a pool may need: no part of a GPU or CPU."""
_TRIES = 3
"""Others may take or give back GPUs while the spacers are set."""
_SETTLES = 1.0
"""Seconds until Ray's nodes have told what is free again."""
_SPACER_SECONDS = 10.0
"""For Ray to place a spacer; one that waits longer has nothing to hold."""
_POLL = 0.1


async def make_again(
    run: str, pool: str, bound: Sequence[BundleBinding], timeout: float
) -> "tuple[PlacementGroup, list[BundleBinding]]":
    """The pool, with one row per bundle, on just the devices of ``bound``.

    The caller has :func:`only_one`: spacers of two pools would take each other's GPUs.

    Raises:
        TransientError: a node is not there, Ray lends other devices, or it did not answer or place
            it in time.
        PermanentError: others hold too many of the GPUs; they are named.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    await _nodes_are_there(run, pool, bound)
    bundles = [{**NEEDS, **_node(row.node_ip)} for row in sorted(bound, key=lambda r: r.bundle)]
    group, rows = await bind_bundles(run, pool, bundles, timeout)
    for _ in range(_TRIES):
        if devices(rows) == devices(bound):
            return group, rows
        await _remove([group])
        await asyncio.sleep(_SETTLES)
        async with _spacers(bound, deadline):
            left = max(_SETTLES, deadline - loop.time())
            group, rows = await bind_bundles(run, pool, bundles, left)
    if devices(rows) != devices(bound):
        await _remove([group])
        raise TransientError(
            f"{pool_name(run, pool)} was bound to {_told(bound)}; Ray lends {_told(rows)}.",
            cure="Others hold its GPUs: `ray list placement-groups`, or relax-infer status.",
        )
    return group, rows


def devices(rows: Iterable[BundleBinding]) -> Counter[str]:
    """What is the same before and after Ray was restarted, which numbers its nodes anew."""
    return Counter(device_of(row) for row in rows)


def device_of(row: BundleBinding) -> str:
    return row.gpu_uuid or f"GPU {row.gpu_id} of {row.node_ip}"


@asynccontextmanager
async def only_one(timeout: float) -> AsyncIterator[None]:
    """Nobody else of the cluster makes a pool again, or lets go of one, meanwhile: a group of one
    name, which goes with the process that has it, is the lock.

    Raises:
        TransientError: somebody else had it for ``timeout`` seconds.
    """
    from ray.exceptions import RaySystemError

    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            held = await _make(_ON_THE_HEAD, _LOCK)
            break
        except RaySystemError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise TransientError(
                    f"Placement group {_LOCK} is held by another worker for {timeout:g} s: {error}"
                ) from error
            await asyncio.sleep(_POLL)
    try:
        yield
    finally:
        await asyncio.shield(_remove([held]))


@asynccontextmanager
async def _spacers(bound: Sequence[BundleBinding], deadline: float) -> AsyncIterator[None]:
    """Every GPU that is free on the nodes of ``bound`` is held, but for its own devices."""
    wanted = devices(bound)
    made: list[PlacementGroup] = []
    try:
        for address in sorted({row.node_ip for row in bound}):
            for _ in range(await _free_gpus(address)):
                bundle = {"GPU": NEEDS["GPU"], **_node(address)}
                made.append(await _make(bundle, ""))
        found = await asyncio.gather(*(_rows(group, deadline) for group in made))
        freed = [
            group
            for group, rows in zip(made, found, strict=True)
            if not rows or devices(rows) & wanted
        ]
        await _remove(freed)
        yield
    finally:
        await asyncio.shield(_remove(made))


async def _make(bundle: dict[str, float], name: str) -> "PlacementGroup":
    """One that goes with this process. Ray's call goes on when its caller is cancelled: what it
    makes then is removed."""
    from ray.util.placement_group import placement_group

    making = asyncio.ensure_future(asked(placement_group, [bundle], "PACK", name))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await _remove([await making])
        raise


async def _rows(group: "PlacementGroup", deadline: float) -> list[BundleBinding]:
    """None where somebody else was faster."""
    identity, loop = group.id.hex(), asyncio.get_running_loop()
    late = min(deadline, loop.time() + _SPACER_SECONDS)
    while (await asked(group_table)).get(identity, {}).get("state") != "CREATED":
        if loop.time() > late:
            return []
        await asyncio.sleep(_POLL)
    return await probe_bundles(group, "a spacer", {}, deadline)


async def _free_gpus(address: str) -> int:
    return int(sum(n.free_gpus for n in await asked(living_nodes) if n.node_ip == address))


async def _nodes_are_there(run: str, pool: str, bound: Sequence[BundleBinding]) -> None:
    wanted = Counter(row.node_ip for row in bound)
    there = Counter[str]()
    for node in await asked(living_nodes):
        there[node.node_ip] += int(node.gpus)
    if missing := sorted(wanted.keys() - there.keys()):
        raise TransientError(
            f"{pool_name(run, pool)} was bound on {', '.join(missing)}, which Ray does not have.",
            cure="Bring the node back: look at `ray status`.",
        )
    for address, gpus in wanted.items():
        if there[address] < gpus:
            raise TransientError(
                f"{pool_name(run, pool)} was bound to {counted(gpus, 'GPU')} of {address}, which"
                f" has {there[address]} now.",
                cure="Bring them back; of a local stack: `relax-infer down`, then"
                f" `relax-infer up --gpus {gpus}`.",
            )


async def _remove(groups: "Iterable[PlacementGroup]") -> None:
    mine = {group.id.hex() for group in groups}
    if mine:
        await remove_groups(lambda identity, entry: identity in mine, timeout=60.0)


def _node(address: str) -> dict[str, float]:
    return {f"node:{address}": OF_A_NODE}


def _told(rows: Iterable[BundleBinding]) -> str:
    return ", ".join(sorted(device_of(row) for row in rows))
