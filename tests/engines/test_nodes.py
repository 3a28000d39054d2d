"""A replica of several nodes: real processes, two nodes on one host, no Ray and no SGLang."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec, EngineOperation
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.engines import host_processes, place, process
from relax_infer.engines.actors import ActorGone
from relax_infer.engines.closed_grants import closed_grants
from relax_infer.engines.command import command_line
from relax_infer.engines.follower import FollowerActor
from relax_infer.engines.host_processes import this_host
from relax_infer.engines.memory import NodeUse
from relax_infer.engines.node import EngineNode, NodeReport
from relax_infer.engines.nodes import ReplicaNodes
from relax_infer.engines.place import Place
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import ReplicaState
from tests.engines.checkpoints import group_spec, make_checkpoint

STAND_IN = Path(__file__).with_name("stand_in_server.py")


class NearFollower:
    """A follower's actor in this process, which can be cut off."""

    def __init__(self, spec: EngineGroupSpec, node: int = 1) -> None:
        self.node = node
        self.spec = spec
        self.actor = FollowerActor(spec, 0, node)
        self.past: list[FollowerActor] = []
        self.cut: Exception | None = None
        self.ends = 0

    def made_again(self) -> None:
        self.past.append(self.actor)
        self.actor = FollowerActor(self.spec, 0, self.node)

    def _reach(self) -> FollowerActor:
        if self.cut is not None:
            raise self.cut
        return self.actor

    async def look(self) -> NodeReport:
        return await self._reach().report()

    report = look

    async def start(self, launch: process.Launch) -> NodeReport:
        return await self._reach().start(launch)

    async def confirm(self, token: FenceToken) -> NodeReport:
        return await self._reach().confirm(token)

    async def end(self, token: FenceToken, ends_grant: bool = False) -> NodeUse:
        self.ends += 1
        return await self._reach().end(token, ends_grant)

    async def forget(self, token: FenceToken, ends_grant: bool = False) -> NodeReport:
        return await self._reach().forget(token, ends_grant)

    async def memory(self) -> NodeUse:
        return await self._reach().memory()


class TwoNodes:
    def __init__(self, folder: Path) -> None:
        bundles = tuple(
            BundleBinding(bundle=k, node_id=f"n{k}", node_ip="127.0.0.1", gpu_id=0) for k in (0, 1)
        )
        sizes: dict[str, Any] = {"gpus_per_replica": 2, "nodes_per_replica": 2}
        self.folder = folder / "version-0"
        self.spec = group_spec(folder, bundles=bundles, launch_timeout=30, **sizes)
        self.head = EngineNode(self.spec, 0, 0)
        self.follower = NearFollower(self.spec)
        self.nodes = ReplicaNodes(self.head, [self.follower])
        self.counter = 0

    def token(self) -> FenceToken:
        self.counter += 1
        return FenceToken(counter=self.counter, grant_id=f"g{self.counter}")

    async def start(self) -> None:
        await self.nodes.start(
            self.spec, token=self.token(), model_path=self.folder, weight_version=0
        )

    def pids(self) -> list[int]:
        reports = (self.head.report(), self.follower.actor._node.report())
        return [pid for report in reports for pid in report.pids]

    def made_again(self) -> EngineReplica:
        """The actor of the head died and another took its place."""
        return EngineReplica(self.spec, 0, "", [self.follower])

    def operation(self) -> EngineOperation:
        token = self.token()
        return EngineOperation(group=self.spec, operation_id=str(token), fence=token)


@pytest_asyncio.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoNodes]:
    make_checkpoint(tmp_path / "version-0", 0)

    def stand_in(*given: Any, **more: Any) -> list[str]:
        return [sys.executable, str(STAND_IN), *command_line(*given, **more)[3:]]

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as short:
        patch.setattr(tempfile, "tempdir", short)
        patch.setenv("RELAX_HOME", str(tmp_path))
        patch.setattr(process, "command_line", stand_in)
        made = TwoNodes(tmp_path)
        yield made
        made.follower.cut = None
        actors = (*made.follower.past, made.follower.actor)
        for node in (made.head, *(actor._node for actor in actors)):
            await node.end()


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if host_processes.process(pid) is not None]


def argument(pid: int, name: str) -> str:
    words = host_processes.command_line(pid).split()
    return words[words.index(name) + 1]


def has_no_file(two: TwoNodes) -> bool:
    return two.head.files.holder() is None and two.follower.actor._node.files.holder() is None


async def test_both_nodes_start_as_ranks_of_one_engine_with_one_rendezvous(two):
    await two.start()
    head, follower = two.pids()
    assert living([head, follower]) == [head, follower]
    for pid, rank in ((head, "0"), (follower, "1")):
        assert argument(pid, "--node-rank") == rank
        assert (argument(pid, "--nnodes"), argument(pid, "--tp-size")) == ("2", "2")
    assert argument(head, "--dist-init-addr") == argument(follower, "--dist-init-addr")
    assert argument(head, "--dist-init-addr").startswith("127.0.0.1:")
    names = [report.incarnation for report in await two.nodes.reports()]
    assert names[1] == f"{names[0]}.node-1"
    assert await two.nodes.lost() is None
    assert two.follower.actor._node.process.holder.base_url is None
    for node, actor in enumerate((two.head, two.follower.actor._node)):
        said = actor.process.holder.processes.node
        assert said == f"127.0.0.1 (Ray node n{node})", "where to look, also where hosts are shared"


async def test_a_follower_that_cannot_start_is_told_at_once_and_leaves_nothing_anywhere(two):
    """pains 23: nobody waits for a peer for ever."""
    (two.folder / "fail-1").touch()
    with pytest.raises(PermanentError, match=r"(?s)node 1.*rank 1 cannot start here"):
        await two.start()
    assert two.nodes.held == frozenset()
    assert has_no_file(two)
    assert two.nodes.engine is None
    (two.folder / "fail-1").unlink()
    await two.start()


async def test_a_head_that_cannot_start_ends_its_follower(two):
    (two.folder / "fail-0").touch()
    with pytest.raises(PermanentError, match="rank 0 cannot start here"):
        await two.start()
    assert two.follower.ends == 1
    assert has_no_file(two)


async def test_a_follower_that_cannot_be_asked_before_the_start_is_no_release_to_prove(two):
    two.follower.cut = TransientError("no room in its bundle")
    with pytest.raises(TransientError, match="no room"):
        await two.start()
    assert two.nodes.held == frozenset()
    assert has_no_file(two)


async def test_ending_proves_every_node_and_a_repeat_asks_nobody(two):
    await two.start()
    pids = two.pids()
    uses = await two.nodes.end(two.token())
    assert [use.node for use in uses] == [0, 1]
    assert living(pids) == []
    assert has_no_file(two)
    assert await two.nodes.end(two.token()) == ()
    assert two.follower.ends == 1


async def test_a_head_that_is_gone_is_not_ended_again_while_its_follower_is_left(two):
    """pains 23: a replica that was partly cleaned can be finished, and only what is left is."""
    await two.start()
    head, follower = two.pids()
    two.follower.cut = UnconfirmedError("policy/replica-0 on its node 1 does not answer")
    with pytest.raises(UnconfirmedError, match="node 1"):
        await two.nodes.end(two.token())
    assert (living([head]), living([follower])) == ([], [follower])
    assert two.nodes.held == {1}
    two.head.end = None  # whoever calls it fails
    with pytest.raises(UnconfirmedError, match="node 1"):
        await two.nodes.end(two.token())
    two.follower.cut = None
    await two.nodes.end(two.token())
    assert living([follower]) == []
    del two.head.end


async def test_a_replica_is_dead_only_when_every_node_has_proved_it(two):
    await two.start()
    pids = two.pids()
    replica = two.made_again()
    assert replica.state is ReplicaState.FAILED
    two.follower.cut = UnconfirmedError("node 1 does not answer")
    with pytest.raises(UnconfirmedError, match="node 1"):
        await replica.stop(two.operation())
    assert replica.state is ReplicaState.FAILED
    assert len(living(pids)) == 1
    with pytest.raises(UnconfirmedError, match="node 1"):
        await replica.offload(two.operation())
    two.follower.cut = None
    evidence = await replica.stop(two.operation())
    assert (replica.state, evidence.proof) == (ReplicaState.DEAD, "process_gone")
    assert living(pids) == []


async def test_a_head_made_again_after_its_server_was_proved_gone_finds_the_follower_left(two):
    await two.start()
    (*_, follower) = two.pids()
    two.follower.cut = UnconfirmedError("node 1 does not answer")
    with pytest.raises(UnconfirmedError):
        await two.nodes.end(two.token())
    replica = two.made_again()
    report = await replica.reports.report()
    assert (report.state, report.error) == (ReplicaState.FAILED, "node 1 does not answer")
    with pytest.raises(UnconfirmedError, match="node 1"):
        await replica.stop(two.operation())
    two.follower.cut = None
    report = await replica.reports.report()
    assert report.state is ReplicaState.FAILED
    assert "follower on node 1 holds incarnation" in (report.error or "")
    await replica.stop(two.operation())
    assert replica.state is ReplicaState.DEAD
    assert living([follower]) == []


async def test_a_replica_that_was_never_launched_is_dead_once_its_follower_has_said_so(two):
    replica = two.made_again()
    two.follower.cut = UnconfirmedError("node 1 does not answer")
    assert (await replica.reports.report()).state is ReplicaState.FAILED
    two.follower.cut = None
    assert (await replica.reports.report()).state is ReplicaState.DEAD
    assert (await replica.reports.report()).error is None


async def test_a_follower_that_lost_a_process_is_named_with_its_node(two):
    await two.start()
    follower = two.pids()[1]
    os.kill(follower, signal.SIGKILL)
    while host_processes.process(follower) is not None:
        pass
    assert "follower on node 1 lost its server" in (await two.nodes.lost() or "")


async def test_a_follower_s_actor_that_is_gone_or_was_made_again_counts_as_lost(two, monkeypatch):
    await two.start()
    two.follower.cut = ActorGone("it died")
    assert "actor of its follower on node 1 is gone" in (await two.nodes.lost() or "")
    two.follower.cut = UnconfirmedError("slow")
    assert await two.nodes.lost() is None
    monkeypatch.setattr("relax_infer.engines.nodes.SILENT_SECONDS", 0.0)
    assert await two.nodes.lost() == "slow"
    two.follower.cut = None
    two.follower.made_again()
    assert "started by an actor that is gone" in (await two.nodes.lost() or "")
    pids = two.pids()
    await two.nodes.end(two.token())
    assert living(pids) == []


async def test_a_follower_refuses_tokens_that_are_lower_or_rival_also_when_made_again(two):
    await two.start()
    seen = two.counter
    for _ in range(2):
        for late in (
            FenceToken(counter=seen - 1, grant_id="earlier"),
            FenceToken(counter=seen, grant_id="rival"),
        ):
            for call in (two.follower.end, two.follower.confirm, two.follower.forget):
                with pytest.raises(StaleFence):
                    await call(late)
        two.follower.made_again()
    assert len(living(two.pids())) == 2


async def test_a_follower_does_not_start_beside_what_it_holds(two):
    await two.start()
    launch = process.Launch(
        group=two.spec,
        incarnation="another",
        token=two.token(),
        model_path=str(two.folder),
        rendezvous="127.0.0.1:1",
    )
    with pytest.raises(UnconfirmedError, match="on its node 1 holds incarnation"):
        await two.follower.start(launch)


def late(two: TwoNodes, token: FenceToken) -> process.Launch:
    """A start that was on its way to the follower while its host was cut off."""
    return process.Launch(
        group=two.spec,
        incarnation="late",
        token=token,
        model_path=str(two.folder),
        rendezvous="127.0.0.1:1",
    )


@pytest.mark.parametrize("whose", [(), (1,)])
async def test_a_follower_starts_nothing_under_a_grant_that_a_person_s_word_closed(two, whose):
    """Also where nothing of it has run yet: its own memory knows no token then."""
    token = two.token()
    closed_grants(two.spec, 0, *whose).close(token)
    with pytest.raises(StaleFence, match="has let go"):
        await two.follower.start(late(two, token))
    assert (await two.follower.look()).incarnation is None
    assert (await two.follower.look()).fence is None


async def test_a_word_for_a_follower_that_cannot_be_reached_closes_its_grant(two):
    """The head answers, and the grant of the replica is opened again; not that of the node which
    nobody could ask."""
    op = two.operation()
    replica = two.made_again()
    two.follower.cut = UnconfirmedError("its host is gone")
    assert (await replica.reports.report()).state is ReplicaState.FAILED
    await replica.forget(op)
    two.follower.cut = None
    with pytest.raises(StaleFence, match="has let go"):
        await two.follower.start(late(two, op.fence))
    assert (await two.follower.look()).incarnation is None
    await replica.forget(op)  # it was reached this time
    closed_grants(two.spec, 0, 1).check(op.fence)


async def test_a_word_that_is_wrong_about_a_follower_leaves_its_grant_open(two):
    await two.start()
    op = two.operation()
    with pytest.raises(PermanentError, match="not gone"):
        await two.nodes.forget(op.fence)
    closed_grants(two.spec, 0, 1).check(op.fence)


@pytest.mark.parametrize("ending", ["end", "forget"])
async def test_a_follower_starts_nothing_under_a_grant_that_ended_there(two, ending):
    token = two.token()
    await getattr(two.follower, ending)(token, True)
    for _ in range(2):
        with pytest.raises(StaleFence, match="has let go"):
            await two.follower.start(late(two, token))
        two.follower.made_again()
    assert (await two.follower.look()).incarnation is None


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stop_ends_the_grant_at_the_followers_unless_it_goes_on_there(two, ends):
    """A recovery that rebuilds stops the old incarnation and starts another within the grant."""
    await two.start()
    replica = two.made_again()
    await replica.recall()
    await replica.stop(two.operation().model_copy(update={"ends_grant": ends}))
    two.follower.made_again()
    assert two.follower.actor._fence.ended is ends


async def test_a_person_s_word_stands_for_a_node_that_cannot_be_asked_not_for_one_that_lives(two):
    await two.start()
    head, follower = two.pids()
    replica = two.made_again()
    with pytest.raises(PermanentError, match="live on this host"):
        await replica.forget(two.operation())
    os.kill(head, signal.SIGKILL)
    while living([head]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(PermanentError, match=f"node 1 is not gone: processes {follower} "):
        await replica.forget(two.operation())
    two.follower.cut = UnconfirmedError("its host is gone")
    await replica.forget(two.operation())
    assert replica.state is ReplicaState.DEAD
    two.follower.cut = None


async def test_a_person_s_word_stands_for_a_follower_that_a_new_head_never_reached(two):
    two.follower.cut = UnconfirmedError("its host is gone")
    replica = two.made_again()
    assert (await replica.reports.report()).state is ReplicaState.FAILED
    await replica.forget(two.operation())
    assert (await replica.reports.report()).state is ReplicaState.DEAD


async def test_a_follower_s_actor_on_another_host_proves_nothing(two, monkeypatch):
    await two.start()
    pids = two.pids()
    monkeypatch.setattr(place, "where_this_is", lambda: Place("10.9.9.9", (0,), this_host()))
    with pytest.raises(UnconfirmedError, match=r"bound on 127\.0\.0\.1.* up on 10\.9\.9\.9"):
        await two.nodes.end(two.token())
    assert living(pids) == pids[1:]
    assert two.nodes.held == {1}
    monkeypatch.undo()
    await two.nodes.end(two.token())
    assert living(pids) == []


def test_sixteen_gpus_on_nodes_of_eight_are_two_actors_at_bundles_0_and_8(tmp_path):
    bundles = tuple(
        BundleBinding(bundle=k, node_id=f"n{k // 8}", node_ip=f"10.0.0.{k // 8}", gpu_id=k % 8)
        for k in range(32)
    )
    sizes: dict[str, Any] = {"gpus_per_replica": 16, "nodes_per_replica": 2, "replicas": 2}
    spec = group_spec(tmp_path, bundles=bundles, **sizes)
    for replica, first in ((0, 0), (1, 16)):
        for node in (0, 1):
            share = spec.node_bundles(replica, node)
            assert [b.bundle for b in share] == list(range(first + 8 * node, first + 8 * node + 8))
            assert len({b.node_id for b in share}) == 1
    assert [spec.actor_name(1, node) for node in (0, 1)] == [
        "engine.rollout.policy.replica-1",
        "engine.rollout.policy.replica-1.node-1",
    ]


def test_gpus_that_nodes_cannot_share_evenly_are_refused(tmp_path):
    spec = group_spec(tmp_path)
    with pytest.raises(ValueError, match="3 GPUs of a replica cannot be shared evenly by 2"):
        EngineGroupSpec(**{**dict(spec), "gpus_per_replica": 3, "nodes_per_replica": 2})
