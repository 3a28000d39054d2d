"""How long a placement group is waited for, and what is said when it does not come; without Ray."""

import asyncio
import importlib
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement import PlacementError, binding, pools
from relax_infer.placement.room import NodeRoom
from tests.placement.recipes import document, engine, plan
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
    await binding._placed("run", "pool", GROUP, {"pool": binding.alike(16)}, deadline)


async def test_a_group_that_comes_is_waited_for(cluster: SimpleNamespace) -> None:
    cluster.states = ["PENDING", "RESCHEDULING", "PENDING", "CREATED"]
    await wait(3600)
    assert cluster.states == ["CREATED"]


async def test_who_waits_is_told_for_whom_and_how_long(cluster: SimpleNamespace) -> None:
    cluster.states = ["PENDING", "PENDING", "PENDING", "CREATED"]
    cluster.nodes = [BUSY, node("2")]
    said: list[str] = []
    deadline = asyncio.get_running_loop().time() + 3600
    wanted = {"pool": binding.alike(16)}
    await binding._placed("run", "pool", GROUP, wanted, deadline, "PACK", said.append)
    assert said
    assert all(re.match(r"waits up to 3\d\d\d s more: bundles 8 to 15 of 16", s) for s in said)
    assert "held by relax-other.pool" in said[-1]


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


async def test_what_one_node_has_to_have_is_told_before_anything_is_made(
    slow: SimpleNamespace,
) -> None:
    """Twelve GPUs on one of two nodes of eight: no time makes them."""
    with pytest.raises(PermanentError, match="no node has room for all 12 bundles") as never:
        await binding.bind_pool("run", 12, 3600, strategy="STRICT_PACK")
    assert str(never.value).count("has room for 8 and then lacks GPU (8 of 8 free)") == 2
    assert not slow.asked.is_set()


async def test_a_node_that_bundles_ask_for_and_that_is_gone_ends_the_wait(
    cluster: SimpleNamespace,
) -> None:
    wanted = {"pool": [{"GPU": 1.0, "CPU": 1.0, "node:10.0.0.9": 0.001}]}
    deadline = asyncio.get_running_loop().time() + 3600
    with pytest.raises(TransientError, match=r"node 10\.0\.0\.9 is asked for by 1 bundle and"):
        await binding._placed("run", "pool", GROUP, wanted, deadline)


@pytest.fixture
def slow(cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray makes a group when ``go`` is set, whoever waits for it by then."""
    ray_groups = importlib.import_module("ray.util.placement_group")
    said = SimpleNamespace(asked=threading.Event(), go=threading.Event(), removed=[])
    said.gone = asyncio.Event()

    def make(bundles: list[Any], strategy: str, name: str, lifetime: str) -> Any:
        assert lifetime == "detached"
        said.asked.set()
        assert said.go.wait(60)
        return GROUP

    async def remove(mine: Any, timeout: float) -> None:
        said.removed.extend(i for i in ("g1", "other") if mine(i, {}))
        said.gone.set()

    monkeypatch.setattr(ray_groups, "placement_group", make)
    monkeypatch.setattr(binding, "find_pool", lambda run, pool: None)
    monkeypatch.setattr(binding, "remove_groups", remove)
    for room in (pools, binding):
        monkeypatch.setattr(room, "LEAST", 0.5)
    return said


async def test_a_group_that_ray_makes_after_a_cancellation_is_given_back(
    slow: SimpleNamespace,
) -> None:
    bind = asyncio.create_task(binding.bind_pool("run", 16, 3600))
    assert await asyncio.to_thread(slow.asked.wait, 60)
    bind.cancel()
    await asyncio.sleep(0)
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await bind
    assert slow.removed == ["g1"]


async def test_a_group_that_ray_makes_after_the_deadline_is_given_back(
    slow: SimpleNamespace,
) -> None:
    """The caller is told in time, and does not wait for it."""
    with pytest.raises(TransientError, match="did not answer within"):
        await binding.bind_pool("run", 16, 1)
    assert slow.asked.is_set()
    assert slow.removed == []
    slow.go.set()
    await asyncio.wait_for(slow.gone.wait(), 60)
    assert slow.removed == ["g1"]


async def test_a_group_that_cannot_be_given_back_hides_no_reason(
    slow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def remove(*_: Any, **__: Any) -> None:
        raise TransientError("placement group relax-run.pool is there after 5 s.")

    monkeypatch.setattr(binding, "remove_groups", remove)
    slow.go.set()
    with pytest.raises(PermanentError, match="could not place") as late:
        await binding.bind_pool("run", 16, 1)
    assert any("is there after 5 s" in note for note in late.value.__notes__)


async def test_a_question_to_ray_ends_with_the_binding_that_asks_it(
    slow: SimpleNamespace,
) -> None:
    now = asyncio.get_running_loop().time()
    with pytest.raises(TransientError, match="did not answer within"):
        await pools.asked(slow.go.wait, deadline=now)
    slow.go.set()


def test_a_found_group_is_adopted_only_if_its_bundles_are_those_of_a_pool() -> None:
    one = {"GPU": 1.0, "CPU": 1.0}
    good = {"bundles": {0: one, 1: one | {"node:10.0.0.1": 0.001}}}
    for lasts in (True, None):
        binding._adopt("run", "pool", GROUP, 16, good, lasts)
    with pytest.raises(PermanentError, match="a pool of 16 GPUs, its recipe says 8"):
        binding._adopt("run", "pool", GROUP, 8, good, True)
    for other in ({"CPU": 1.0}, one | {"GPU": 2.0}, one | {"CPU": 2.0}, {"GPU": 1.0}):
        with pytest.raises(PermanentError, match=r"bundle 1 of placement group relax-run\.pool is"):
            binding._adopt("run", "pool", GROUP, 16, {"bundles": {0: one, 1: other}}, True)
    with pytest.raises(PermanentError, match=r"group relax-run\.pool is not detached") as short:
        binding._adopt("run", "pool", GROUP, 16, good, False)
    assert "detached" in short.value.cure


async def test_only_the_runs_own_pools_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []

    async def remove(mine: Any, timeout: float) -> None:
        names = ("relax-a.pool", "relax-a.trainer", "relax-a.b.pool", "relax-ab.pool", "other", "")
        chosen.extend(name for name in names if mine("g", {"name": name}))

    monkeypatch.setattr(pools, "remove_groups", remove)
    await pools.release_pools("a")
    assert chosen == ["relax-a.pool", "relax-a.trainer"]


@pytest.mark.parametrize("borrowed", ["trainer", "rollout"])
async def test_of_a_plan_with_a_lent_pool_and_one_of_its_own_only_its_own_is_removed(
    borrowed: str, cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 8.6. Both are probed, and an engine's devices are on two nodes."""
    made = plan(document("decoupled", 4, ranks=2, rollout=engine(2, 2)))
    owned = "rollout" if borrowed == "trainer" else "trainer"
    groups: dict[str, Any] = {
        pool: SimpleNamespace(id=SimpleNamespace(hex=lambda pool=pool: pool), bundle_count=2)
        for pool in (owned, borrowed)
    }
    there, begun = {borrowed}, list[str]()
    nodes = [each.node_id for each in cluster.nodes]
    bundles = {k: {"GPU": 1.0, "CPU": 1.0} for k in range(2)}

    def make(_: Any, strategy: str, name: str, lifetime: str) -> Any:
        pool = name.rpartition(".")[2]
        begun.append(pool)
        there.add(pool)
        return groups[pool]

    async def remove(mine: Any, timeout: float) -> None:
        there.difference_update([pool for pool in groups if mine(pool, {})])

    async def probe(_: Any, name: str, *__: Any) -> list[BundleBinding]:
        """The engine's two devices are one on each node."""
        split = name.endswith("rollout")
        return [
            BundleBinding(
                bundle=k, node_id=nodes[split * k], node_ip="10.0.0.1", gpu_id=k + 2 * (not split)
            )
            for k in range(2)
        ]

    table = {
        pool: {
            "state": "CREATED",
            "name": f"relax-run.{pool}",
            "bundles": bundles,
            "bundles_to_node_id": dict(enumerate(nodes)),
        }
        for pool in groups
    }
    ray_groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(ray_groups, "placement_group", make)
    monkeypatch.setattr(
        binding, "find_pool", lambda run, pool: groups[pool] if pool in there else None
    )
    monkeypatch.setattr(binding, "group_table", lambda: table)
    monkeypatch.setattr(binding, "is_detached", lambda identity: True)
    monkeypatch.setattr(binding, "probe_bundles", probe)
    monkeypatch.setattr(binding, "remove_groups", remove)
    with pytest.raises(PlacementError) as refused:
        await binding.bind_plan("run", made, 60)
    assert any("one node" in violation.rule for violation in refused.value.violations)
    assert begun == [owned]
    assert there == {borrowed}
