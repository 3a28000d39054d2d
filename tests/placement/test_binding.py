"""Pools of GPUs on a real Ray: two nodes of eight pretended GPUs each."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.engines.actor import ReplicaDescription
from relax_infer.engines.node import NodeReport
from relax_infer.machines import ReplicaState
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    bind_plan,
    bind_pool,
    binding,
    find_pool,
    model_placement,
    probes,
    release_pool,
    release_pools,
    run_actors,
    validate_bound_placement,
)
from relax_infer.placement.facts import Wanted
from relax_infer.placement.live import look_at_cluster
from relax_infer.placement.preflight import judge
from tests.placement.conftest import free_in_bundles
from tests.placement.recipes import document, engine, plan, read

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("two_nodes"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WIDE = document("defer", 16, rollout=engine(16, 16), genrm=engine(16, 8))
RUNS = tuple(f"run-{n}" for n in range(1, 12))
Probe = Callable[..., Any]


@pytest.fixture(autouse=True)
async def each_test_gives_its_pools_back() -> AsyncIterator[None]:
    yield
    left = [
        run
        for run in RUNS
        for pool in ("pool", "rollout", "teacher", "trainer")
        if find_pool(run, pool)
    ]
    for run in left:
        await release_pools(run)
    assert left == []


async def no_probe_is_left(bundles: int) -> None:
    deadline = time.monotonic() + 60
    while (free := free_in_bundles()) != [1.0] * bundles:
        assert time.monotonic() < deadline, free
        await asyncio.sleep(0.05)


async def test_a_replica_over_two_nodes_gets_each_node_whole_and_no_probe_is_left() -> None:
    """pains 23: 16 GPUs on nodes of 8; both nodes are there, and in order."""
    made = plan(WIDE)
    pools = await bind_plan("run-1", made, 60)
    rows = pools["pool"]
    assert sorted(r.bundle for r in rows) == list(range(16))
    assert [r.gpu_id for r in rows] == [*range(8), *range(8)]
    assert len({r.node_id for r in rows[:8]}) == len({r.node_id for r in rows[8:]}) == 1
    assert len({r.node_id for r in rows}) == 2
    assert all(r.node_ip and r.gpu_uuid is None for r in rows)  # these GPUs are pretended
    wide = model_placement(made, "rollout")
    assert wide is not None
    assert (wide.nodes_per_engine, validate_bound_placement(wide, rows)) == (2, rows)
    assert pickle.loads(pickle.dumps(pools)) == pools
    await no_probe_is_left(16)
    await release_pools("run-1")


async def test_binding_again_finds_the_same_pool() -> None:
    first = await bind_pool("run-2", 2, 60)
    group = find_pool("run-2")
    assert await bind_pool("run-2", 2, 60) == first
    assert find_pool("run-2") == group
    with pytest.raises(PermanentError, match="pool of 2 GPUs, its recipe says 1"):
        await bind_pool("run-2", 1, 5)
    assert find_pool("run-2") == group
    await release_pool("run-2")


@pytest.mark.parametrize(
    ("bundle", "lifetime", "says"),
    [
        ({"GPU": 2, "CPU": 1}, "detached", "not one GPU and one CPU"),
        ({"GPU": 1, "CPU": 1}, None, "is not detached"),
    ],
)
async def test_a_lent_group_of_other_bundles_or_of_another_lifetime_is_refused(
    bundle: dict[str, float], lifetime: str | None, says: str
) -> None:
    from ray.util.placement_group import placement_group

    group = placement_group([bundle] * 2, name="relax-run-2.pool", lifetime=lifetime)
    await asyncio.to_thread(group.wait, 30)
    with pytest.raises(PermanentError, match=says):
        await bind_pool("run-2", 2, 30)
    assert find_pool("run-2") is not None
    await release_pool("run-2")


async def test_a_pool_that_can_never_fit_is_refused_before_anything_is_made() -> None:
    """pains 24: which bundle lacks what on which node, instead of a wait for ever."""
    with pytest.raises(PermanentError) as refused:
        await bind_pool("run-3", 17, 60)
    text = str(refused.value)
    assert "run run-3 needs 17 GPUs: bundle 16 of 17 (1 GPU and 1 CPU each) finds no room" in text
    assert text.count("has room for 8 and then lacks GPU (8 of 8 free)") == 2
    assert find_pool("run-3") is None


async def test_a_pool_that_others_hold_names_them_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pains 24: in time, and with the holder's name."""
    monkeypatch.setattr(binding, "probe_bundles", pretended([("a", k) for k in range(15)]))
    await bind_pool("run-4", 15, 60)
    with pytest.raises(PermanentError) as late:  # nobody waits for `bind_timeout` twice
        await bind_pool("run-5", 2, 1)
    text = str(late.value)
    assert "bundle 1 of 2 (1 GPU and 1 CPU each) finds no room" in text
    assert "lacks GPU (0 of 8 free)" in text
    assert "held by relax-run-4.pool" in text
    assert find_pool("run-5") is None
    assert find_pool("run-4") is not None
    await release_pool("run-4")
    monkeypatch.undo()
    assert len(await bind_pool("run-5", 2, 60)) == 2
    await release_pool("run-5")


async def test_release_is_idempotent_and_takes_the_actors_along() -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    await bind_pool("run-6", 1, 60)

    class Holder:
        def there(self) -> bool:
            return True

    place = PlacementGroupSchedulingStrategy(find_pool("run-6"), placement_group_bundle_index=0)
    holder = ray.remote(Holder).options(num_cpus=0, num_gpus=0.5, scheduling_strategy=place)
    actor = holder.remote()
    assert await actor.there.remote()
    await release_pools("run-6")
    await release_pools("run-6")
    with pytest.raises(ray.exceptions.ActorDiedError):
        await actor.there.remote()


async def test_each_pool_of_a_plan_is_a_group_of_its_own_with_other_devices() -> None:
    made = plan(document("decoupled", 4, ranks=2, rollout=engine(2, 2)))
    pools = await bind_plan("run-7", made, 60)
    assert {pool: len(rows) for pool, rows in pools.items()} == dict(made.pool_sizes)
    assert len({(r.node_id, r.gpu_id) for rows in pools.values() for r in rows}) == 4
    await release_pools("run-7")
    assert find_pool("run-7", "trainer") is None


@pytest.mark.wide
async def test_a_small_pool_does_not_spoil_the_node_that_a_later_one_needs_whole() -> None:
    """Ray begins each pool on the node with the most free: the judge would be beside no rollout."""
    made = plan(
        document(
            *("decoupled", 16),
            ranks=2,
            rollout=engine(2),
            genrm=engine(4, 4),
            teacher=engine(8, 8),
        )
    )
    pools = await bind_plan("run-7", made, 60)
    assert list(pools) == [pool for pool, _ in made.pool_sizes]
    assert len({row.node_id for row in pools["teacher"]}) == 1
    await release_pools("run-7")


@pytest.mark.wide
async def test_roles_side_by_side_have_devices_of_their_own() -> None:
    """Mode split: every engine is within a node, and no two of them share a device."""
    recipe = document(
        "split", 16, rollout=engine(8, 4), genrm=engine(4, 2), teacher=engine(4, 4), ranks=16
    )
    made = plan(recipe)
    rows = (await bind_plan("run-7", made, 60))["pool"]
    used: list[tuple[str, int]] = []
    for placement in made.placements:
        mine = validate_bound_placement(placement, rows)
        for k in range(0, len(mine), placement.gpus_per_engine):
            assert len({r.node_id for r in mine[k : k + placement.gpus_per_engine]}) == 1
        used += [(r.node_id, r.gpu_id) for r in mine]
    assert len(used) == len(set(used)) == 16
    await no_probe_is_left(16)
    await release_pools("run-7")


TWO = plan(document("defer", 4, rollout=engine(4, 2)))
OVER = plan(
    document("defer", 4, rollout=engine(4, 4)) | {"cluster": {"gpus": 4, "gpus_per_node": 2}}
)
LAYOUTS = {
    "same physical GPU": (TWO, [("a", 0), ("a", 0), ("a", 2), ("a", 3)]),
    "one node": (TWO, [("a", 0), ("a", 1), ("a", 2), ("b", 3)]),
    "contiguous": (TWO, [("a", 0), ("a", 2), ("a", 4), ("a", 5)]),
    "distinct nodes": (OVER, [("a", 0), ("a", 1), ("a", 2), ("a", 3)]),
    "exceeds": (TWO, [("a", 0), ("a", 1), ("a", 2)]),
}


def pretended(devices: list[tuple[str, int]]) -> Probe:
    """A probe that finds these devices on the cluster's two nodes, in a shuffled order."""

    async def probe(*_: object) -> list[BundleBinding]:
        first, second = sorted(node.node_id for node in binding.living_nodes())
        ids = {"a": first, "b": second}
        return [
            BundleBinding(bundle=k, node_id=ids[n], node_ip="10.0.0.1", gpu_id=gpu)
            for k, (n, gpu) in reversed(list(enumerate(devices)))
        ]

    return probe


@pytest.mark.parametrize(
    ("says", "borrowed"), [*((says, False) for says in LAYOUTS), ("one node", True)]
)
async def test_an_illegal_layout_is_refused_and_only_a_group_of_our_own_is_removed(
    says: str, borrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 8.6; a found group may have engines in it."""
    made, devices = LAYOUTS[says]
    assert await bind_pool("run-8", 1, 60)  # a bystander
    if borrowed:
        await bind_pool("run-9", 4, 60)
    monkeypatch.setattr(binding, "probe_bundles", pretended(devices))
    with pytest.raises(PlacementError) as refused:
        await bind_plan("run-9", made, 30)
    assert any(says in v.rule for v in refused.value.violations)
    assert (find_pool("run-9") is not None) == borrowed
    assert find_pool("run-8") is not None
    for run in ("run-8", "run-9"):
        await release_pools(run)


async def test_bundles_in_whatever_order_ray_numbers_them_are_put_in_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shuffled = [("b", 3), ("a", 2), ("b", 2), ("a", 3)]
    monkeypatch.setattr(binding, "probe_bundles", pretended(shuffled))
    for made in (TWO, OVER):
        rows = (await bind_plan("run-9", made, 30))["pool"]
        assert [r.bundle for r in rows] == [1, 3, 2, 0]
        assert [r.gpu_id for r in rows] == [2, 3, 2, 3]
        await release_pools("run-9")


def two_of_one_number(rows: list[BundleBinding]) -> list[BundleBinding]:
    return [row.model_copy(update={"bundle": 0}) for row in rows]


def no_node(rows: list[BundleBinding]) -> list[BundleBinding]:
    return [row.model_copy(update={"node_id": ""}) for row in rows]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("spoilt", "says"),
    [(two_of_one_number, "duplicate bundle index 0"), (no_node, "on a node without identity")],
)
async def test_rows_that_cannot_be_give_the_group_back(
    spoilt: Callable[[list[BundleBinding]], list[BundleBinding]],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = binding.probe_bundles

    async def other(*arguments: Any) -> list[BundleBinding]:
        return spoilt(await probe(*arguments))

    monkeypatch.setattr(binding, "probe_bundles", other)
    with pytest.raises((PlacementError, TransientError), match=says):
        await bind_plan("run-9", TWO, 30)
    assert find_pool("run-9") is None


async def test_a_device_without_a_number_gives_the_group_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = probes._answers

    async def by_uuid(*arguments: Any) -> list[Any]:
        return [each | {"gpu_id": "GPU-5e4a"} for each in await answers(*arguments)]

    monkeypatch.setattr(probes, "_answers", by_uuid)
    with pytest.raises(PermanentError, match="has the GPU id 'GPU-5e4a', not a number"):
        await bind_plan("run-9", TWO, 30)
    assert find_pool("run-9") is None


async def test_a_probe_that_dies_leaves_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a group that was there before, which stays: they would hold a part of its GPUs."""
    rows = await bind_pool("run-9", 4, 60)
    await no_probe_is_left(4)
    victim = (rows[0].node_id, str(rows[0].gpu_id))

    class Dies:
        def device(self) -> dict[str, Any]:
            import os
            import time

            import ray

            here = (ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0]))
            if here == victim:
                os._exit(1)
            time.sleep(3600)
            return {}

    monkeypatch.setattr(probes, "_Probe", Dies)
    with pytest.raises(TransientError, match=f"probing bundle {rows[0].bundle} on node .* failed"):
        await bind_pool("run-9", 4, 120)
    assert find_pool("run-9") is not None
    await no_probe_is_left(4)
    await release_pools("run-9")


@pytest.mark.wide
async def test_a_living_cluster_describes_every_node(tmp_path: Path) -> None:
    asked = Wanted(store=tmp_path.as_uri(), models=(str(tmp_path),), ports=8)
    recipe = read(WIDE, train__ranks=1)
    made = plan(WIDE)
    found = await look_at_cluster(asked)
    assert [n.free_bundles for n in found.nodes] == [8, 8]
    assert not found.accelerators
    assert all(node.silent is None and node.models == {str(tmp_path): 0} for node in found.facts)
    assert [f.name for f in judge(recipe, made, asked, found) if f.result == "missing"] == []
    await bind_pool("run-1", 4, 60)
    held = await look_at_cluster(asked)
    assert held.groups == ("relax-run-1.pool",)
    assert sorted(n.free_bundles for n in held.nodes) == [4, 8]
    (busy,) = [f for f in judge(recipe, made, asked, held) if f.result == "missing"]
    assert "held by relax-run-1.pool" in busy.text
    await release_pools("run-1")


@pytest.mark.wide
async def test_what_the_actors_of_a_run_hold_is_asked_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins under the names of the real ones; a real front is in tests/gateway."""
    import ray

    monkeypatch.setattr(run_actors, "ASK_SECONDS", 60.0)

    class Head:
        async def describe(self) -> ReplicaDescription:
            nodes = (NodeReport(node=0, actor_pid=1, incarnation="a"),)
            nodes += (NodeReport(node=1, actor_pid=1, incarnation="a.node-1"),)
            return ReplicaDescription(
                replica=0,
                engine_id="policy/replica-0",
                state=ReplicaState.READY,
                actor_pid=1,
                incarnation="a",
                nodes=nodes,
            )

    class Rank:
        async def ping(self) -> int:
            return 7

    class Front:
        async def describe(self) -> dict[str, Any]:
            return {"router_url": "http://127.0.0.1:9", "router_pid": 8, "router_alive": True}

    made = [
        (Head, "engine.rollout.policy.replica-0"),
        (Head, "engine.rollout.policy.replica-0.node-1"),
        (Rank, "trainer.rank-0"),
        (Front, "front"),
    ]
    actors = [
        ray.remote(kind).options(name=name, namespace="relax-run-1", num_cpus=0).remote()
        for kind, name in made
    ]
    found = await look_at_cluster(Wanted(store="s3://b", models=(), ports=1))
    assert sorted((a.run, a.actor, a.holds, a.silent) for a in found.actors) == [
        ("run-1", "engine.rollout.policy.replica-0", ("a", "a.node-1"), False),
        ("run-1", "trainer.rank-0", ("7",), False),
    ]
    (router,) = found.routers
    assert (router.run, router.pid) == ("run-1", 8)
    assert "http://127.0.0.1:9/health does not answer" in str(router.fault)
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize("what", ["a probe that fails", "a node that is gone"])
async def test_a_probe_that_fails_gives_the_group_back(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> list[BundleBinding]:
        if what == "a probe that fails":
            raise TransientError(what)
        return [BundleBinding(bundle=0, node_id="gone", node_ip="10.0.0.9", gpu_id=0)]

    monkeypatch.setattr(binding, "probe_bundles", fails)
    with pytest.raises(TransientError, match=r"fails|gone, which is not a living node"):
        await bind_pool("run-10", 1, 30)
    assert find_pool("run-10") is None


async def test_a_binding_that_is_cancelled_gives_the_group_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_work = asyncio.Event()

    async def hangs(*_: object) -> list[BundleBinding]:
        at_work.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(binding, "probe_bundles", hangs)
    bind = asyncio.create_task(bind_pool("run-10", 1, 30))
    await at_work.wait()
    assert find_pool("run-10") is not None
    bind.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bind
    assert find_pool("run-10") is None


@pytest.mark.wide
async def test_a_node_that_dies_while_its_bundles_are_probed_is_named_in_time(
    two_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last: the cluster has one node less from here on."""
    probe = binding.probe_bundles
    made: InferencePlacementPlan = plan(WIDE)

    async def dies(*arguments: Any) -> list[BundleBinding]:
        victim = next(n for n in two_nodes.list_all_nodes() if n != two_nodes.head_node)
        dead.append(victim.node_id)
        await asyncio.to_thread(two_nodes.remove_node, victim, allow_graceful=False)
        return await probe(*arguments)

    dead: list[str] = []
    monkeypatch.setattr(binding, "probe_bundles", dies)
    with pytest.raises(TransientError) as lost:
        await bind_plan("run-11", made, 20)
    assert dead[0] in str(lost.value), lost.value
    assert find_pool("run-11") is None
    monkeypatch.setattr(binding, "probe_bundles", probe)
    # Ray takes its time to notice; until then the pool is late, from then on it can never be.
    for _ in range(10):
        with pytest.raises((PermanentError, TransientError)) as again:
            await bind_plan("run-11", made, 5)
        assert find_pool("run-11") is None
        if isinstance(again.value, PermanentError):
            break
    assert "bundles 8 to 15 of 16 (1 GPU and 1 CPU each) find no room" in str(again.value)
