"""One real engine over two nodes of a real Ray cluster: both pretended on this host."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import pytest_asyncio

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.engines import EngineGroup, ReplicaDescription, host_processes, read_evidence
from relax_infer.engines.holder import HolderFiles
from relax_infer.machines import ReplicaState
from relax_infer.placement import bind_pool, release_pool
from tests.engines.checkpoints import group_spec, make_checkpoint
from tests.engines.test_real_group import RealGroup, states

pytestmark = [
    pytest.mark.wide,
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

READY, SLEEPING, DEAD = ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.DEAD


@pytest.fixture(scope="module")
def two_ray_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes with one pretended GPU each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, namespace="relax", log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(
    two_ray_nodes: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealGroup]:
    folder = tmp_path_factory.mktemp("nodes")
    for version in (0, 1):
        make_checkpoint(folder / f"version-{version}", seed=version)
    run = f"nodes-{os.getpid()}"
    bundles = tuple(await bind_pool(run, 2, 60))
    assert len({bundle.node_id for bundle in bundles}) == 2
    spec = group_spec(
        folder,
        run=run,
        bundles=bundles,
        gpus_per_replica=2,
        nodes_per_replica=2,
        launch_timeout=300,
    )
    made = RealGroup(folder, EngineGroup(spec))
    try:
        yield made
    finally:
        report = await made.group.stop(made.operation())
        assert states(report) == [DEAD]
        await release_pool(run)


async def sample(url: str) -> list[int]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [6, 2, 9, 3, 22], "sampling_params": sampling}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", json=body) as got:
        assert got.status == 200
        return (await got.json())["output_ids"]


async def one_node_samples(real: RealGroup) -> list[int]:
    spec: EngineGroupSpec = real.group.spec.model_copy(
        update={"model": "alone", "gpus_per_replica": 1, "nodes_per_replica": 1}
    )
    alone = RealGroup(real.folder, EngineGroup(spec))
    report = await alone.ready(0)
    tokens = await sample(report.replicas[0].base_url or "")
    assert states(await alone.group.stop(alone.operation())) == [DEAD]
    return tokens


async def ready(real: RealGroup, version: int = 0) -> str:
    report = await real.ready(version)
    assert states(report) == [READY]
    return report.replicas[0].base_url or ""


async def described(real: RealGroup) -> ReplicaDescription:
    (found,) = await real.group.describe()
    return found


def pids(where: ReplicaDescription) -> list[int]:
    return [pid for node in where.nodes for pid in node.pids]


def living(which: list[int]) -> list[int]:
    return [pid for pid in which if host_processes.process(pid) is not None]


def scheduler(which: tuple[int, ...]) -> int:
    rows = [host_processes.process(pid) for pid in which]
    (found,) = [row.stamp.pid for row in rows if row is not None and "schedul" in row.command]
    return found


async def test_two_nodes_are_one_engine_that_samples_what_one_node_samples(real):
    import ray.util

    expected = await one_node_samples(real)
    url = await ready(real)
    assert await sample(url) == expected
    where = await described(real)
    assert [(node.node, node.lost) for node in where.nodes] == [(0, None), (1, None)]
    head, follower = where.nodes
    assert follower.incarnation == f"{head.incarnation}.node-1"
    assert (len(head.pids), len(follower.pids)) == (4, 2)
    spec = real.group.spec
    names = {spec.actor_name(0), spec.actor_name(0, 1)}
    assert names == {
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == spec.namespace
    }


async def test_an_offload_an_onload_and_new_weights_go_to_every_rank_and_are_read_back(real):
    url = await ready(real)
    first = (await real.group.read_weights()).replicas[0]
    before = await sample(url)
    offloaded = await real.group.offload(real.operation())
    assert states(offloaded) == [SLEEPING]
    assert offloaded.evidence is not None
    assert [e.proof for e in read_evidence(offloaded.evidence)] == ["simulated"]
    url = await ready(real, 1)
    second = (await real.group.read_weights()).replicas[0]
    assert (second.state, second.weight_version) == (READY, 1)
    assert second.weights_digest not in (None, first.weights_digest)
    assert await sample(url) != before
    loaded = await real.group.load_weights(real.operation(0))
    assert loaded.errors() == ()
    third = (await real.group.read_weights()).replicas[0]
    assert (third.weight_version, third.weights_digest) == (0, first.weights_digest)
    assert await sample(url) == before


async def test_a_lost_scheduler_of_the_follower_is_noticed_and_the_whole_replica_is_rebuilt(real):
    await ready(real)
    where = await described(real)
    lost = scheduler(where.nodes[1].pids)
    watch = asyncio.create_task(real.group.watch({0: where.incarnation or ""}))
    os.kill(lost, signal.SIGKILL)
    (report,) = (await asyncio.wait_for(watch, 60)).lost
    assert report.state is ReplicaState.FAILED
    assert "node 1" in (report.error or "")
    stopped = await real.group.stop(real.operation())
    assert states(stopped) == [DEAD]
    assert stopped.evidence is not None
    assert [e.proof for e in read_evidence(stopped.evidence)] == ["process_gone"]
    assert living(pids(where)) == []
    await ready(real)
    again = await described(real)
    assert again.incarnation not in (None, where.incarnation)
    assert len(again.nodes) == 2


async def test_a_lost_actor_of_the_follower_costs_the_replica_which_an_onload_rebuilds(real):
    await ready(real)
    where = await described(real)
    watch = asyncio.create_task(real.group.watch({0: where.incarnation or ""}))
    os.kill(where.nodes[1].actor_pid, signal.SIGKILL)
    (report,) = (await asyncio.wait_for(watch, 60)).lost
    assert report.state is ReplicaState.FAILED
    assert "node 1" in (report.error or "")
    assert len(living(pids(where))) == 6
    await ready(real)
    assert living(pids(where)) == []
    assert [node.lost for node in (await described(real)).nodes] == [None, None]


async def test_an_actor_of_the_head_made_again_finds_both_nodes_and_ends_them(real):
    await ready(real)
    where = await described(real)
    os.kill(where.actor_pid, signal.SIGKILL)
    report = (await real.group.probe()).replicas[0]
    while report.state is READY:
        report = (await real.group.probe()).replicas[0]
    assert (report.state, report.incarnation) == (ReplicaState.FAILED, where.incarnation)
    found = await described(real)
    assert [node.incarnation for node in found.nodes] == [n.incarnation for n in where.nodes]
    assert len(living(pids(where))) == 6
    stopped = await real.group.stop(real.operation())
    assert states(stopped) == [DEAD]
    assert living(pids(where)) == []


async def test_stopped_it_has_neither_processes_nor_actors(real):
    import ray

    assert states(await real.group.stop(real.operation())) == [DEAD]
    spec: EngineGroupSpec = real.group.spec
    for node in (0, 1):
        with pytest.raises(ValueError, match="Failed to look up actor"):
            ray.get_actor(spec.actor_name(0, node), namespace=spec.namespace)
        assert HolderFiles(spec, 0, node=node).holder() is None
