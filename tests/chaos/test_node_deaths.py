"""A cluster of two nodes, one GPU each, pretended on this machine: a follower dies, a node dies.

The nodes share a kernel, so a node that comes back is the same host, whose files and processes can
be looked at again; until then nobody may speak for what was on it.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.contrib.pydantic import pydantic_data_converter

from relax_infer.contracts.run import ResolveRun
from relax_infer.engines import ReplicaDescription, host_processes
from relax_infer.machines import RunState
from tests.chaos.harm import (
    TABLE,
    Healing,
    Wound,
    describe,
    healed,
    lease_since,
    nobody_was_beside_another,
    nothing_is_left,
)
from tests.chaos.nodes import PretendedNode
from tests.chaos.test_engine_deaths import OVERRIDES, onload_since, under_way, whole
from tests.e2e.conftest import fresh_stack
from tests.e2e.looking import Handle, RunFiles, lease_status, start, status, until
from workers.local import Stack

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

FAR, JUDGE = "rollout.policy.replica-1", "genrm.judge.replica-0"
ON_TWO_NODES = OVERRIDES | {"cluster.gpus_per_node": 1, "lease.reconcile_timeout": 20}


class Cluster:
    """The stack, whose own node has no GPU, and two nodes that have one each."""

    def __init__(self, stack: Stack, nodes: dict[str, PretendedNode], client: Client) -> None:
        self.stack, self.nodes, self.client = stack, nodes, client

    async def node_of(self, run: str, engine: str) -> PretendedNode:
        """By the address that the engine listens on."""
        url = (await describe(run, engine)).base_url
        assert url is not None
        return self.nodes[url.removeprefix("http://").partition(":")[0]]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[tuple[Stack, dict[str, PretendedNode]]]:
    with fresh_stack(gpus=0) as stack, stack.joined_ray("tests"):
        nodes = {ip: PretendedNode(stack, ip) for ip in ("127.0.0.3", "127.0.0.4")}
        for node in nodes.values():
            node.start()
        yield stack, nodes
    for node in nodes.values():
        node.reap()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(two_nodes: tuple[Stack, dict[str, PretendedNode]]) -> AsyncIterator[Cluster]:
    stack, nodes = two_nodes
    client = await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter)
    yield Cluster(stack, nodes, client)


async def test_a_lost_follower_and_nodes_that_come_back_cost_no_person_and_no_batch(
    cluster: Cluster,
):
    """pains 5, 7: the judge is one engine over both nodes; a scheduler of its far half dies, at
    work and at rest. Then the far node is lost to Ray while the engine on it goes on, and dies with
    everything on it."""
    client = cluster.client
    overrides = ON_TWO_NODES | {"genrm.engine.gpus_per_replica": 2}
    handle = await start(client, steps=4, overrides=overrides)
    run, files = handle.id, RunFiles(cluster.stack.home, handle.id)

    await until(lambda: under_way(files, 1, "judged"), 500, "step 1's judging")
    wound = await kill_follower(run, "at work")
    TABLE.append(await healed(client, f"{run}.{JUDGE}.recovery-1", wound))

    await until(lambda: under_way(files, 2, "generated"), 500, "step 2's generation")
    wound = await kill_follower(run, "asleep")
    await until(lambda: is_anew(run, JUDGE, wound), 400, "the judge to be rebuilt")
    nothing_is_left(wound)
    TABLE.append(
        Healing(
            what=wound.what,
            noticed=await onload_since(client, run, "genrm", wound.at),
            recovered=time.time() - wound.at,
            lease=await lease_since(client, run, wound.at),
            step="goes on; the next onload launches both halves anew",
        )
    )

    await until(lambda: under_way(files, 3, "generated"), 500, "step 3's generation")
    await node_goes_and_comes(cluster, run, engines=False)
    await until(lambda: under_way(files, 4, "generated"), 500, "step 4's generation")
    await node_goes_and_comes(cluster, run, engines=True)
    await until(lambda: over(handle), 500, "the end of the run")
    whole(files, 4)
    nobody_was_beside_another(files)


async def node_goes_and_comes(cluster: Cluster, run: str, *, engines: bool) -> None:
    """It is lost until the lease waits for a proof; nobody has to say anything."""
    client, far = cluster.client, await cluster.node_of(run, FAR)
    lost = await describe(run, FAR)
    far.kill(engines=engines)
    what = "node dead with its engine" if engines else "node lost to Ray, its engine lives"
    wound = Wound(what, str(lost.incarnation), lost.pids, time.time())
    await until(lambda: rollout_is(client, run, "BLOCKED"), 240, "the lease to be BLOCKED")
    blocked = time.time()
    living = [pid for pid in wound.pids if host_processes.process(pid) is not None]
    assert bool(living) != engines, "its engine was to share its fate"
    far.start()
    back = time.time()
    await until(lambda: is_anew(run, FAR, wound), 400, "the engine to be rebuilt")
    nothing_is_left(wound)
    TABLE.append(
        Healing(
            what=f"{wound.what}; back after {back - wound.at:.0f} s",
            noticed=blocked - wound.at,
            recovered=time.time() - wound.at,
            lease=await lease_since(client, run, wound.at),
            step="waits; goes on by itself once the node is back",
        )
    )


async def test_a_node_that_never_comes_back_is_left_out_on_a_person_s_word(cluster: Cluster):
    """pains 5: nobody guesses that what cannot be asked is gone."""
    client = cluster.client
    handle = await start(client, steps=2, overrides=ON_TWO_NODES)
    run, files = handle.id, RunFiles(cluster.stack.home, handle.id)
    await until(lambda: under_way(files, 1, "judged"), 500, "step 1's judging")
    lost = await describe(run, FAR)
    far = await cluster.node_of(run, FAR)
    far.kill(engines=True)
    wound = Wound("node dead for good", str(lost.incarnation), lost.pids, time.time())
    await until(lambda: waits(handle), 500, "the run to wait for a person")
    blocked = time.time()
    seen = await status(handle)
    assert seen is not None
    assert f"node {far.address}" in seen.doing
    assert "resolve" in seen.doing
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update("resolve", ResolveRun(who="ada", why="it burned"))
    assert "confirm_released" in str(refused.value.cause)
    word = ResolveRun(who="ada", why="it burned", confirm_released=True)
    await handle.execute_update("resolve", word)
    TABLE.append(
        Healing(
            what=wound.what,
            noticed=blocked - wound.at,
            recovered=time.time() - wound.at,
            lease=await lease_since(client, run, wound.at),
            step="waits for a person's word; goes on with the replicas that are left",
        )
    )
    await until(lambda: over(handle), 500, "the end of the run")
    whole(files, 2)
    nobody_was_beside_another(files)


async def kill_follower(run: str, doing: str) -> Wound:
    """SIGKILL the scheduler of the judge's second node."""
    where: ReplicaDescription = await describe(run, JUDGE)
    assert where.incarnation is not None
    pids = tuple(pid for node in where.nodes for pid in node.pids)
    for pid in where.nodes[1].pids:
        row = host_processes.process(pid)
        if row is not None and "schedul" in row.command:
            os.kill(pid, signal.SIGKILL)
            break
    else:
        raise AssertionError(f"{where.engine_id} has no scheduler on its second node")
    return Wound(
        f"{JUDGE} follower's scheduler SIGKILL, {doing}", where.incarnation, pids, time.time()
    )


async def rollout_is(client: Client, run: str, state: str) -> bool:
    return (await lease_status(client, run)).roles["rollout"].state == state


async def is_anew(run: str, engine: str, wound: Wound) -> bool:
    try:
        now = await describe(run, engine)
    except Exception:  # no actor yet, or one that just died
        return False
    return now.incarnation not in (None, wound.incarnation) and now.state == "READY"


async def waits(handle: Handle) -> bool:
    seen = await status(handle)
    return seen is not None and seen.state is RunState.BLOCKED


async def over(handle: Handle) -> bool:
    seen = await status(handle)
    assert seen is None or seen.state is not RunState.FAILED, seen.doing
    return seen is not None and seen.state is RunState.DONE
