"""How long a placement group is waited for, and what is said when it does not come; without Ray."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement import binding, pools
from relax_infer.placement.room import NodeRoom
from tests.placement.test_room import node

GROUP: Any = SimpleNamespace(id=SimpleNamespace(hex=lambda: "g1"), bundle_count=16)
BUSY = node("1", free_gpus=0.0, holders=("relax-other.pool",))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``states`` are what Ray says of the group, one after another, the last for ever."""
    said = SimpleNamespace(states=["PENDING"], nodes=[node("1"), node("2")])

    def table() -> dict[str, Any]:
        state = said.states.pop(0) if len(said.states) > 1 else said.states[0]
        return {"g1": {"state": state, "name": "relax-run.pool"}}

    def nodes() -> list[NodeRoom]:
        return said.nodes

    monkeypatch.setattr(binding, "group_table", table)
    monkeypatch.setattr(binding, "living_nodes", nodes)
    monkeypatch.setattr(binding, "_POLL", 0.0)
    monkeypatch.setattr(binding, "_LOOK", 0.0)
    return said


async def wait(seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    await binding._placed("run", "relax-run.pool", GROUP, {"pool": 16}, deadline)


async def test_a_group_that_comes_is_waited_for(cluster: SimpleNamespace) -> None:
    cluster.states = ["PENDING", "RESCHEDULING", "PENDING", "CREATED"]
    await wait(3600)
    assert cluster.states == ["CREATED"]


async def test_a_node_that_is_lost_meanwhile_ends_the_wait(cluster: SimpleNamespace) -> None:
    """pains 24: a group that lost its node would be RESCHEDULING for ever."""
    cluster.states, cluster.nodes = ["RESCHEDULING"], [node("1")]
    with pytest.raises(TransientError, match="the cluster has become too small") as lost:
        await wait(3600)
    assert "bundles 8 to 15 of 16" in str(lost.value)


async def test_a_group_that_was_removed_ends_the_wait(cluster: SimpleNamespace) -> None:
    cluster.states = ["PENDING", "REMOVED"]
    with pytest.raises(TransientError, match="was removed while it was being placed"):
        await wait(3600)


async def test_at_the_deadline_the_holders_are_named(cluster: SimpleNamespace) -> None:
    """pains 24."""
    cluster.nodes = [BUSY, node("2")]
    with pytest.raises(PermanentError, match=r"could not place relax-run\.pool in time") as late:
        await wait(0.0)
    assert "bundles 8 to 15 of 16" in str(late.value)
    assert "held by relax-other.pool" in str(late.value)
    assert "cluster.bind_timeout" in late.value.cure


def test_a_found_group_is_adopted_only_if_its_bundles_are_those_of_a_pool() -> None:
    good = {"bundles": {0: {"GPU": 1.0, "CPU": 1.0}, 1: {"GPU": 1.0, "CPU": 2.0}}}
    binding._adopt("run", "pool", GROUP, 16, good)
    with pytest.raises(PermanentError, match="a pool of 16 GPUs, its recipe says 8"):
        binding._adopt("run", "pool", GROUP, 8, good)
    with pytest.raises(PermanentError, match=r"bundle 1 of placement group relax-run\.pool is"):
        binding._adopt(
            "run", "pool", GROUP, 16, {"bundles": {0: good["bundles"][0], 1: {"CPU": 1}}}
        )


async def test_only_the_runs_own_pools_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    async def remove(mine: Any, timeout: float) -> None:
        names = ("relax-a.pool", "relax-a.trainer", "relax-a.b.pool", "relax-ab.pool", "other", "")
        chosen.extend(name for name in names if mine("g", {"name": name}))

    monkeypatch.setattr(pools, "remove_groups", remove)
    await pools.release_pools("a")
    assert chosen == ["relax-a.pool", "relax-a.trainer"]
