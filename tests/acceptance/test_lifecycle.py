"""What must happen to engines: their states, the fence around the dead, and late answers."""

import asyncio
import os
import signal

import pytest
from temporalio.client import WorkflowUpdateFailedError

from relax_infer.contracts.engines import GroupReport, ReplicaReport
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.lease import LeaseAnswer, LeaseCommand
from relax_infer.discovery import InferenceRegistry, RouteResolver
from relax_infer.engines import InferenceRecoveryRequired, prove_release
from relax_infer.machines import RECOVERY, RecoveryEvent, RecoveryState, ReplicaState, RunState
from relax_infer.placement import pools
from tests.acceptance.source import ROOT, modules_that_name
from tests.engines.checkpoints import group_spec
from tests.engines.test_nodes import TwoNodes, argument, living, two
from tests.engines.test_release import Tree, alive
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_engines_that_fail import events, role_is
from tests.workflows.test_training_run import Working, lease, nothing_was_broken, start
from workflows._group_book import GroupBook
from workflows._registry import models_of

__all__ = ["two"]

READY, FAILED = ReplicaState.READY, ReplicaState.FAILED


def test_lifecycle_operation_succeeds_for_some_replicas(tmp_path):
    """Each has its own outcome; one that failed has no address and gets no request."""
    book = GroupBook(group_spec(tmp_path, role="genrm", replicas=3, weight_source="STATIC"))
    book.begin_onload()
    outcomes = [
        ReplicaReport(
            replica=k,
            engine_id=f"policy/replica-{k}",
            state=state,
            base_url=f"http://127.0.0.1:{9000 + k}",  # also the failed one still listens
            incarnation=f"i-{k}",
            error=None if state is READY else "it ran out of memory",
        )
        for k, state in enumerate((READY, FAILED, READY))
    ]
    book.settle_onload(GroupReport(replicas=tuple(outcomes)))
    assert (book.ready, book.failed) == ((0, 2), (1,))
    assert book.errors() == "policy/replica-1: it ran out of memory"
    snapshot = book.snapshot()
    document = InferenceRegistry("genrm").publish(models_of((snapshot,), None))
    (model,) = document["models"].values()
    assert [engine["base_url"] for engine in model["engines"]] == [
        "http://127.0.0.1:9000",
        None,
        "http://127.0.0.1:9002",
    ]
    resolver = RouteResolver()
    asked = [resolver.resolve(document, model="policy").base_url for _ in range(6)]
    assert set(asked) == {"http://127.0.0.1:9000", "http://127.0.0.1:9002"}


def test_engine_actor_confirmed_dead():
    """Its server may be alive: what cannot be told is neither killed nor called gone, and nothing
    is rebuilt before there is a proof."""
    made = Tree("bare")  # its child shed the mark by which an engine's processes are known
    try:
        made.parent.kill()
        made.parent.wait()
        for _ in range(2):
            with pytest.raises(InferenceRecoveryRequired, match=f"{made.child} "):
                prove_release(made.engine, timeout=2)
        assert alive(made.child) == [made.child]
        os.kill(made.child, signal.SIGKILL)
        while alive(made.child):
            pass
        assert prove_release(made.engine, timeout=20).stopped == ()
    finally:
        made.end()
    into = {
        event for (_, event), to in RECOVERY.transitions.items() if to is RecoveryState.REBUILDING
    }
    assert into == {RecoveryEvent.RELEASE_PROVED}


async def test_follower_of_a_multi_node_replica_dies(two: TwoNodes):
    """The whole replica is lost and ended; a node that cannot prove its part keeps the replica's
    fence, and no engine's code gives a placement group back."""
    await two.start()
    head, follower = two.pids()
    replica = two.made_again()
    os.kill(follower, signal.SIGKILL)
    while living([follower]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert "follower on node 1" in (await two.nodes.lost() or "")
    two.follower.cut = UnconfirmedError("node 1 does not answer")
    with pytest.raises(UnconfirmedError, match="node 1"):
        await two.nodes.end(two.token())
    assert living([head]) == []
    assert two.nodes.held == {1}
    assert replica.state is FAILED
    two.follower.cut = None
    assert (await replica.stop(two.operation())).proof == "process_gone"
    assert replica.state is ReplicaState.DEAD
    assert modules_that_name("remove_placement_group") == {pools.__name__}


async def test_several_nodes_are_tested_or_their_absence_is_stated(two: TwoNodes):
    """Two nodes on one host are one engine with one rendezvous, here without SGLang and in
    tests/engines/test_real_nodes.py with it; what was not there to test on is said."""
    await two.start()
    head, follower = two.pids()
    assert [argument(pid, "--node-rank") for pid in (head, follower)] == ["0", "1"]
    assert len({argument(pid, "--dist-init-addr") for pid in (head, follower)}) == 1
    real = (ROOT / "tests/engines/test_real_nodes.py").read_text()
    assert "pytest.mark.real" in real
    assert "skip" not in real
    limits = (ROOT / "docs/reliability.md").read_text().partition("## Limits")[2]
    assert "Real multi-host clusters and CUDA have not been run in CI" in limits


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("work", "call", "role", "proof"),
    [
        pytest.param(
            "judge_samples", "offload_engines", "genrm", "RELEASE_PROVED", id="an-offload"
        ),
        pytest.param(
            *("train_step", "onload_engines", "rollout", "ACTIVE_PROVED"),
            id="a-load-of-new-weights",
            marks=pytest.mark.wide,
        ),
    ],
)
async def test_lifecycle_call_times_out(
    working: Working, work: str, call: str, role: str, proof: str
):
    """pains 8: the lease is BLOCKED and nobody else gets the GPUs; the answer that comes late
    changes nothing, a probe does."""
    world = ScriptedWorld(operation_timeout=8.0, reconcile_timeout=600.0)
    world.faults[work] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        world.faults[call] = ["hang"]
        world.go_on.set()
        await world.stuck.wait()
        await until(lambda: role_is(client, handle, role, "BLOCKED"), seconds=120)
        before = list(world.log)
        method = "activate" if work == "judge_samples" else "acquire"
        held = f"leases held by {role} (BLOCKED)"
        for other in ("teacher", "trainer"):
            # The trainer has no part in a batch that is being scored, whoever holds what.
            why = "acquire it to train" if (method, other) == ("activate", "trainer") else held
            with pytest.raises(WorkflowUpdateFailedError) as refused:
                await client.get_workflow_handle(f"{handle.id}.lease").execute_update(
                    method,
                    LeaseCommand(operation_id=f"eve-{other}", role=other, purpose="eval"),
                    result_type=LeaseAnswer,
                )
            assert why in str(refused.value.cause)
        assert world.log == before
        world.freed.set()
        done = await handle.result()
        happened = events(await lease(client, handle), role)
    assert happened[happened.index("TIMED_OUT") + 1] == proof
    assert done.state is RunState.DONE
    nothing_was_broken(world)
