"""Two real engines in the bundles of a real Ray pool, behind a real router."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from relax_infer.contracts.engines import EngineOperation, GroupReport, OffloadCheck
from relax_infer.contracts.failures import TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines import (
    EngineGroup,
    RouterAdapter,
    check_evidence,
    host_processes,
    read_evidence,
    read_request_log,
    router_command,
)
from relax_infer.engines.process import free_ports
from relax_infer.machines import ReplicaState
from relax_infer.placement import bind_pool, release_pool
from tests.engines.checkpoints import group_spec, make_checkpoint
from tests.local_ray import ray_cluster

__all__ = ["ray_cluster"]

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = ("r/9/g0/s0", "r/9/g0/s1")
READY, SLEEPING, DEAD = ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.DEAD


class RealGroup:
    def __init__(self, folder: Path, group: EngineGroup) -> None:
        self.folder, self.group, self.counter = folder, group, 0

    def operation(self, version: int | None = None, **more: Any) -> EngineOperation:
        self.counter += 1
        weights = None
        if version is not None:
            uri = f"file://{self.folder / f'version-{version}'}"
            weights = WeightsRef(version=version, uri=uri, digest="")
        token = FenceToken(counter=self.counter, grant_id=f"grant-{self.counter}")
        given = {"operation_id": f"op-{self.counter}", "fence": token, "weights": weights}
        return EngineOperation(**{"group": self.group.spec, **given, **more})

    async def ready(self, version: int) -> GroupReport:
        report = await self.group.onload(self.operation(version))
        assert report.errors() == ()
        return report


def states(report: GroupReport) -> list[ReplicaState]:
    return [replica.state for replica in report.replicas]


def urls(report: GroupReport) -> list[str]:
    return [replica.base_url for replica in report.replicas if replica.base_url]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(
    ray_cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealGroup]:
    folder = tmp_path_factory.mktemp("group")
    for version in (0, 1):
        make_checkpoint(folder / f"version-{version}", seed=version)
    run = f"engines-{os.getpid()}"
    bundles = tuple(await bind_pool(run, 2, 60))
    spec = group_spec(folder, run=run, replicas=2, bundles=bundles)
    made = RealGroup(folder, EngineGroup(spec))
    try:
        yield made
    finally:
        report = await made.group.stop(made.operation())
        assert states(report) == [DEAD, DEAD]
        await release_pool(run)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[RouterAdapter]:
    port, prometheus = free_ports("127.0.0.1", 2)
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *router_command(port, prometheus), stdout=output, stderr=subprocess.STDOUT
        )
        adapter = RouterAdapter(f"http://127.0.0.1:{port}", timeout=20)
        deadline = asyncio.get_running_loop().time() + 60
        while True:
            try:
                assert await adapter.workers() == {}
                break
            except TransientError:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.1)
        yield adapter
        process.terminate()
        await process.wait()


async def generate(url: str, rid: str, tokens: int = 2) -> tuple[int, dict[str, Any]]:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": [6, 2, 9], "rid": rid, "sampling_params": sampling}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", json=body) as got:
        return got.status, await got.json()


async def test_before_anything_was_launched_every_replica_is_dead_and_nothing_is_started(real):
    report = await real.group.probe()
    assert states(report) == [DEAD, DEAD]
    assert [d.pids for d in await real.group.describe()] == [(), ()]


async def test_the_first_onload_launches_both_with_the_same_digest_of_their_weights(real):
    report = await real.ready(0)
    assert states(report) == [READY, READY]
    assert len({replica.weights_digest for replica in report.replicas}) == 1
    assert len(set(urls(report))) == 2
    assert {replica.fence for replica in report.replicas} == {
        FenceToken(counter=real.counter, grant_id=f"grant-{real.counter}")
    }
    assert [d.engine_id for d in await real.group.describe()] == [
        "policy/replica-0",
        "policy/replica-1",
    ]


async def test_the_router_holds_exactly_the_workers_it_was_given_and_a_repeat_changes_nothing(
    real, router
):
    both = urls(await real.ready(0))
    for wanted in (both, both, both[:1], [], both):
        await router.set_workers(wanted)
        assert await router.workers() == dict.fromkeys(wanted, True)


async def test_a_worker_that_does_not_answer_is_no_confirmed_worker(router, real):
    dead = f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    impatient = RouterAdapter(router.url, timeout=1.5)
    with pytest.raises(TransientError, match=dead):
        await impatient.set_workers([*urls(await real.ready(0)), dead])


async def test_requests_through_the_router_reach_both_and_a_closed_engine_is_asked_once(
    real, router
):
    await router.set_workers(urls(await real.ready(0)))
    for k in range(8):
        assert (await generate(router.url, f"spread-{k}"))[0] == 200
    logs = [Path(d.request_log or "") for d in await real.group.describe()]
    counts = [
        sum(str(row["rid"]).startswith("spread-") for row in read_request_log(log)) for log in logs
    ]
    assert counts == [8, 8]  # admitted and ended, four requests each
    await real.group.offload(real.operation())
    before = sum(len(list(read_request_log(log))) for log in logs)
    assert (await generate(router.url, "closed"))[0] == 503
    assert sum(len(list(read_request_log(log))) for log in logs) == before + 1


async def test_an_offload_stages_evidence_that_proves_it_and_a_repeat_returns_the_same(real):
    await real.ready(0)
    operation = real.operation()
    report = await real.group.offload(operation)
    assert states(report) == [SLEEPING, SLEEPING]
    assert report.evidence is not None
    check = OffloadCheck(
        role="rollout",
        fence=operation.fence,
        evidence=(report.evidence,),
        holders=("policy/replica-0", "policy/replica-1"),
    )
    assert check_evidence(check, read_evidence(report.evidence)).proof == ("simulated",)
    assert await real.group.offload(operation) == report


async def test_new_weights_are_the_same_on_every_engine_and_read_back_from_each(real):
    await real.ready(0)
    report = await real.group.load_weights(real.operation(1))
    assert report.errors() == ()
    read = await real.group.read_weights()
    assert [r.weight_version for r in read.replicas] == [1, 1]
    assert {r.weights_digest for r in read.replicas} == {r.weights_digest for r in report.replicas}
    assert len({r.weights_digest for r in read.replicas}) == 1


async def test_a_stale_operation_is_refused_by_all_and_changes_nothing(real):
    await real.ready(1)
    seen = real.counter
    earlier = FenceToken(counter=seen - 1, grant_id=f"grant-{seen - 1}")
    for call in (real.group.offload, real.group.stop, real.group.load_weights):
        late = real.operation(0, fence=earlier)
        with pytest.raises(StaleFence, match=f"{earlier} is stale: {seen}:"):
            await call(late)
    report = await real.group.probe()
    assert [(r.state, r.weight_version) for r in report.replicas] == [(READY, 1), (READY, 1)]


async def test_a_token_that_is_stale_for_one_replica_only_is_told_and_not_raised(real):
    import ray

    await real.ready(1)
    spec = real.group.spec
    operation = real.operation(1, operation_id="ahead")
    ahead = FenceToken(counter=real.counter + 1, grant_id="ahead")
    first = ray.get_actor(spec.actor_name(0), namespace=spec.namespace)
    await first.operate.remote("onload", operation.model_copy(update={"fence": ahead}))
    report = await real.group.onload(real.operation(1, fence=operation.fence))
    assert states(report) == [ReplicaState.FAILED, READY]
    assert "stale" in report.errors()[0]
    assert len(report.errors()) == 1


async def test_requests_are_settled_on_every_engine(real):
    report = await real.ready(1)
    asked = [
        asyncio.create_task(generate(url, rid, 900))
        for rid, url in zip(LONG, urls(report), strict=True)
    ]
    logs = [Path(d.request_log or "") for d in await real.group.describe()]
    while not all(any(row["rid"] in LONG for row in read_request_log(log)) for log in logs):
        assert not any(task.done() for task in asked)
        await real.group.describe()  # gives the requests their time
    assert await real.group.settle_requests("r/9/") == 2
    for _, answer in await asyncio.gather(*asked):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_one_replica_that_died_does_not_hide_what_the_other_reached(real):
    await real.ready(1)
    first, second = await real.group.describe()
    os.kill(first.pids[0], signal.SIGKILL)
    report = await real.group.probe()
    while states(report)[0] is READY:
        report = await real.group.probe()
    assert states(report) == [ReplicaState.FAILED, READY]
    assert "policy/replica-0" in report.errors()[0]
    offloaded = await real.group.offload(real.operation())
    assert states(offloaded) == [SLEEPING, SLEEPING]
    assert offloaded.evidence is not None
    proofs = [evidence.proof for evidence in read_evidence(offloaded.evidence)]
    assert proofs == ["process_gone", "simulated"]
    assert [pid for pid in first.pids if host_processes.process(pid) is not None] == []
    assert (await real.group.describe())[1].incarnation == second.incarnation


async def test_an_actor_that_died_is_made_again_and_its_engine_is_released_by_proof(real):
    await real.ready(1)
    lost = (await real.group.describe())[0]
    os.kill(lost.actor_pid, signal.SIGKILL)
    report = await real.group.probe()
    while states(report)[0] is READY:
        report = await real.group.probe()
    assert states(report) == [ReplicaState.FAILED, READY]
    assert host_processes.process(lost.pids[0]) is not None
    report = await real.group.offload(real.operation())
    assert report.errors() == ()
    assert [pid for pid in lost.pids if host_processes.process(pid) is not None] == []


async def test_stopping_ends_processes_and_actors_and_a_repeat_finds_nothing_to_end(real):
    before = await real.group.describe()
    for _ in range(2):
        report = await real.group.stop(real.operation())
        assert states(report) == [DEAD, DEAD]
        assert report.evidence is not None
        assert {e.proof for e in read_evidence(report.evidence)} == {"process_gone"}
    pids = [pid for description in before for pid in description.pids]
    assert [pid for pid in pids if host_processes.process(pid) is not None] == []


async def test_without_its_pool_a_group_is_unknown_not_gone(real):
    elsewhere = real.group.spec.model_copy(update={"run": "no-such-run"})
    report = await EngineGroup(elsewhere).probe()
    assert states(report) == [ReplicaState.FAILED, ReplicaState.FAILED]
    assert "placement group" in report.errors()[0]
    with pytest.raises(UnconfirmedError, match="placement group"):
        await EngineGroup(elsewhere).settle_requests("r/")
