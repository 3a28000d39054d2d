"""Ray's placement groups of a run: their names, and how they are found and removed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from relax_infer.contracts.failures import TransientError
from relax_infer.placement.placed import POOL
from relax_infer.placement.ray_view import group_table

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")

_POLL = 0.1
_ASK = 30.0
"""Seconds that Ray's own control plane may take to answer."""
LEAST = 5.0
"""Seconds for an answer that is wanted when the time of everything is over."""


def pool_name(run: str, pool: str = POOL) -> str:
    """Ray keeps placement group names per job namespace, which a worker shares between runs."""
    return f"relax-{run}.{pool}"


def find_pool(run: str, pool: str = POOL) -> "PlacementGroup | None":
    """The run's placement group from any job of the cluster; None when there is none.

    ``pool`` is what engine groups and trainer name as ``placement_group``. Blocks for one call to
    Ray's control plane.
    """
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    for identity, entry in group_table().items():
        if entry["name"] == pool_name(run, pool) and entry["state"] != "REMOVED":
            return PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))
    return None


async def release_pools(run: str, timeout: float = 60.0) -> None:
    """Remove every pool of the run, with every actor in it, and see them gone. Idempotent.

    Raises:
        TransientError: one was still there after ``timeout`` seconds.
    """
    prefix = pool_name(run, "")

    def mine(identity: str, entry: dict[str, Any]) -> bool:
        name: str = entry["name"]  # "relax-a.b.pool" is none of run "a"
        return name.startswith(prefix) and "." not in name.removeprefix(prefix)

    await remove_groups(mine, timeout)


async def release_pool(run: str, timeout: float = 60.0, pool: str = POOL) -> None:
    """Remove one pool of the run likewise."""
    await remove_groups(lambda identity, entry: entry["name"] == pool_name(run, pool), timeout)


async def remove_groups(chosen: Callable[[str, dict[str, Any]], bool], timeout: float) -> None:
    """Remove the groups that ``chosen(id, entry)`` names until none is left."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        table = await asked(group_table, deadline=deadline)
        left = {i: e for i, e in table.items() if e["state"] != "REMOVED" and chosen(i, e)}
        if not left:
            return
        for identity in left:
            group = PlacementGroup(PlacementGroupID(bytes.fromhex(identity)))
            await asked(remove_placement_group, group, deadline=deadline)
        if loop.time() > deadline:
            names = ", ".join(entry["name"] for entry in left.values())
            raise TransientError(f"placement group {names} is there after {timeout:g} s.")
        await asyncio.sleep(_POLL)


async def asked(call: Callable[..., T], *arguments: object, deadline: float | None = None) -> T:
    """The answer of Ray's control plane, off the loop.

    Args:
        deadline: of the running loop's clock, for everything that the caller does.

    Raises:
        TransientError: there was none in time.
    """
    return await answered(asyncio.to_thread(call, *arguments), deadline)


async def answered(answer: Awaitable[T], deadline: float | None = None) -> T:
    """The same for a question that was asked already."""
    seconds = _ASK
    if deadline is not None:
        seconds = min(_ASK, max(LEAST, deadline - asyncio.get_running_loop().time()))
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError as error:
        raise TransientError(
            f"Ray's control plane did not answer within {seconds:.0f} s.",
            cure="Look at `ray status`.",
        ) from error
