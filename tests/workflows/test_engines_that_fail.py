"""Replicas that die, hang and hide: what the engine group, the lease and the step make of it."""

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import LeaseAnswer, LeaseCommand, LeaseStatus, RoleResult
from relax_infer.contracts.recovery import RecoveryResult
from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import GroupState, RecoveryState, ReplicaState, RunState
from tests.marks import wide
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import (
    Handle,
    Working,
    blocked,
    lease,
    nothing_was_broken,
    start,
    status,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def group(client: Client, handle: Handle, name: str = "rollout.policy") -> GroupSnapshot:
    workflow = client.get_workflow_handle(f"{handle.id}.{name}")
    return await workflow.query("snapshot", result_type=GroupSnapshot)


async def recovery(client: Client, handle: Handle, name: str) -> RecoveryResult:
    workflow = client.get_workflow_handle(f"{handle.id}.{name}", result_type=RecoveryResult)
    return await workflow.result()


def events(seen: LeaseStatus, role: str) -> list[str]:
    return [t.event for t in seen.transitions if t.role == role]


async def test_a_replica_that_dies_at_work_is_rebuilt_and_its_sibling_is_left_alone(
    working: Working,
):
    """pains 1, 6: rebuilt after proof, routed only with the step's weights."""
    world = ScriptedWorld()
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        world.engines.engines["rollout", 1].die()
        await until(lambda: replica_is(client, handle, 1, ReplicaState.READY, generation=2))
        seen = await group(client, handle)
        assert (seen.state, seen.generations) == (GroupState.READY, (1, 2))
        assert (await lease(client, handle)).roles["rollout"].state == "ACTIVE"
        world.go_on.set()
        done = await handle.result()
        ended = await recovery(client, handle, "rollout.policy.replica-1.recovery-1")
    assert ended.state is RecoveryState.READMITTED
    assert ended.report is not None
    assert ended.report.weight_version == 0
    assert done.state is RunState.DONE
    assert world.engines.launches.count(("rollout", 0)) == 1
    shown = published(world, "rollout")
    lost = next(k for k, states in enumerate(shown) if states == ["READY", "FAILED"])
    assert ["READY", "READY"] in shown[lost:]
    nothing_was_broken(world)


async def replica_is(
    client: Client, handle: Handle, replica: int, state: ReplicaState, generation: int
) -> bool:
    seen = await group(client, handle)
    known = {r.replica: r.state for r in seen.replicas}
    return known[replica] is state and seen.generations[replica] == generation


def published(world: ScriptedWorld, role: str) -> list[list[str]]:
    """State of every replica in every document that was pushed; FAILED ones have no address."""
    shown: list[list[str]] = []
    for push in world.pushes:
        if push.role == role:
            for model in push.document["models"].values():  # type: ignore[attr-defined]
                engines = model["engines"]
                assert all(e["base_url"] is None for e in engines if e["state"] != "READY")
                shown.append([e["state"] for e in engines])
    return shown


@pytest.mark.parametrize("phase", ["generate_groups", *wide("judge_samples", "teach_samples")])
async def test_a_phase_whose_engine_died_waits_for_the_rebuilt_one(working: Working, phase: str):
    world = ScriptedWorld()
    world.faults[phase] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert world.calls[phase] == 2
    assert all(t.state != "BLOCKED" for t in seen.transitions)
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_replica_that_dies_on_onload_is_rebuilt_before_the_grant_is_answered(
    working: Working,
):
    """pains 4: resume may kill the process; the step never hears of it."""
    world = ScriptedWorld()
    world.faults["onload_engines"] = ["", "", "", "die"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert all(t.state != "BLOCKED" for t in seen.transitions)
    assert world.calls["launch_engines"] > 0
    nothing_was_broken(world)


async def test_a_request_that_never_drains_ends_with_its_engine_and_by_proof(working: Working):
    """pains 3, 19: nothing is released on the strength of a timeout."""
    world = ScriptedWorld()
    world.faults["offload_engines"] = ["", "", "wedge"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert all(t.state != "BLOCKED" for t in seen.transitions)
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_replica_that_cannot_be_launched_is_given_up_and_comes_back_when_asked(
    working: Working,
):
    world = ScriptedWorld()
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        lost = world.engines.engines["rollout", 1]
        lost.launches_fail = 3
        lost.die()
        await until(lambda: replica_is(client, handle, 1, ReplicaState.DEAD, generation=1))
        await until(lambda: in_state(client, handle, GroupState.READY))
        ended = await recovery(client, handle, "rollout.policy.replica-1.recovery-1")
        assert ended.state is RecoveryState.ABANDONED
        assert "3 launches failed: Transient: it did not answer" in (ended.why or "")
        role = client.get_workflow_handle(f"{handle.id}.rollout")
        await role.execute_update("recover", result_type=RoleResult)
        assert await replica_is(client, handle, 1, ReplicaState.READY, generation=2)
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def in_state(client: Client, handle: Handle, state: GroupState) -> bool:
    return (await group(client, handle)).state is state


async def test_a_run_goes_on_with_the_replicas_that_are_left(working: Working):
    world = ScriptedWorld()
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=2)
        await world.held.wait()
        lost = world.engines.engines["rollout", 1]
        lost.launches_fail = 100
        lost.die()
        await until(lambda: replica_is(client, handle, 1, ReplicaState.DEAD, generation=1))
        launched = len(world.engines.launches)
        world.go_on.set()
        done = await handle.result()
    assert done.step == 2
    assert ("rollout", 1) not in world.engines.launches[launched:]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_the_only_replica_given_up_ends_the_step_and_has_another_chance_in_the_next(
    working: Working,
):
    world = ScriptedWorld(reconcile_timeout=60.0)
    world.faults["judge_samples"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        judge = world.engines.engines["genrm", 0]
        judge.launches_fail = 3
        judge.die()
        await until(lambda: in_group_state(client, handle, "genrm.genrm", GroupState.SLEEPING))
        world.go_on.set()
        await until(lambda: blocked(handle))
        assert (await lease(client, handle)).holder is None
        await handle.execute_update("resolve", ResolveRun(who="ada", why="disk is free again"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]


async def in_group_state(client: Client, handle: Handle, name: str, state: GroupState) -> bool:
    return (await group(client, handle, name)).state is state


async def test_without_proof_the_lease_is_blocked_and_goes_on_as_soon_as_there_is_one(
    working: Working,
):
    """pains 5, 7: dead for Ray, alive on its host. Nothing is launched beside it."""
    world = ScriptedWorld(reconcile_timeout=60.0)
    world.faults["judge_samples"] = ["kill_engine"]
    judge = world.engines.engines["genrm", 0]
    judge.hides = True
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: role_is(client, handle, "genrm", "BLOCKED"))
        seen = await group(client, handle, "genrm.genrm")
        assert seen.state is GroupState.BLOCKED
        assert "hides its environment" in (seen.stuck or "")
        launches = world.engines.launches.count(("genrm", 0))
        assert (await status(handle)).state is RunState.RUNNING
        judge.hides = False
        done = await handle.result()
        ended = await lease(client, handle)
    assert done.state is RunState.DONE
    assert world.engines.launches.count(("genrm", 0)) == launches + 1
    assert "ACTIVE_PROVED" in events(ended, "genrm")
    nothing_was_broken(world)


@pytest.mark.wide
async def test_the_run_is_told_in_time_also_while_a_probe_gets_no_answer(working: Working):
    world = ScriptedWorld(reconcile_timeout=0.5, operation_timeout=600.0)
    world.faults["judge_samples"] = ["kill_engine"]
    judge = world.engines.engines["genrm", 0]
    judge.hides = True
    async with working(world) as client:
        handle = await start(client, steps=1)
        world.faults["probe_engines"] = ["hang"]
        await world.stuck.wait()
        await until(lambda: blocked(handle))
        judge.hides = False
        world.freed.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.parametrize("method", [*wide("onload"), "offload"])
async def test_a_trainer_that_is_silent_blocks_its_lease_within_the_time_of_an_operation(
    working: Working, method: str
):
    """Its activities could take four times 15 minutes before anybody was told."""
    world = ScriptedWorld(reconcile_timeout=60.0, operation_timeout=2.0)
    world.faults[f"{method}_trainer"] = ["hang"] * 4
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: trainer_timed_out(client, handle))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


async def trainer_timed_out(client: Client, handle: Handle) -> bool:
    try:
        return "TIMED_OUT" in events(await lease(client, handle), "trainer")
    except Exception:
        return False


async def role_is(client: Client, handle: Handle, role: str, state: str) -> bool:
    try:
        seen = await lease(client, handle)
    except Exception:
        return False
    return seen.roles[role].state == state


async def test_a_person_s_word_is_refused_while_the_engine_s_host_shows_a_process(
    working: Working,
):
    world = ScriptedWorld(reconcile_timeout=0.5)
    world.faults["judge_samples"] = ["kill_engine"]
    judge = world.engines.engines["genrm", 0]
    judge.hides = True
    word = ResolveRun(who="ada", why="I looked", confirm_released=True)
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("resolve", word)
        assert "process 7 of it lives on this host" in str(refused.value.cause)
        assert await blocked(handle)
        assert judge.holds
        judge.hides = False
        await client.get_workflow_handle(f"{handle.id}.lease").execute_update(
            "reconcile", LeaseCommand(operation_id="ada-1"), result_type=LeaseAnswer
        )
        await until(lambda: not_blocked(handle))
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def not_blocked(handle: Handle) -> bool:
    return not await blocked(handle)


async def test_a_host_that_is_gone_is_left_out_on_a_person_s_word(working: Working):
    """The sibling goes on; what was on the lost host is never launched again by itself."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    world.faults["generate_groups"] = ["hold"]
    word = ResolveRun(who="ada", why="the node burned", confirm_released=True)
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        lost = world.engines.engines["rollout", 1]
        lost.hides = lost.unreachable = True
        lost.die("its actor cannot be reached")
        await until(lambda: blocked(handle))
        shown = await group(client, handle)
        assert [r.state for r in shown.replicas] == [ReplicaState.READY, ReplicaState.FAILED]
        launched = len(world.engines.launches)
        await handle.execute_update("resolve", word)
        lost.state = ReplicaState.DEAD  # what the word says is true
        assert (await group(client, handle)).state is GroupState.READY
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    assert ("rollout", 1) not in world.engines.launches[launched:]
    assert world.violations == []


async def test_a_person_may_have_every_role_restarted_before_a_step_is_tried_again(
    working: Working,
):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        launched = len(world.engines.launches)
        terms = [push.term for push in world.pushes]
        again = ResolveRun(who="ada", why="another judge", action="restart")
        await handle.execute_update("resolve", again)
        done = await handle.result()
    assert done.state is RunState.DONE
    restarted = {role for role, _ in world.engines.launches[launched:]}
    assert restarted == {"rollout", "genrm", "teacher"}
    assert world.calls["bind_placement"] == 1, "they come back on the GPUs that were bound"
    assert min(push.term for push in world.pushes[len(terms) :] if push.role == "genrm") >= 1
    assert max(push.term for push in world.pushes) > max(terms)
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        pytest.param(["refuse"], "forget_engines refused", id="it refuses: it was reached"),
        pytest.param(["flake"] * 4, "say it again", id="nobody carried the word out"),
    ],
)
async def test_a_word_that_did_not_come_to_pass_is_not_believed(
    working: Working, faults: list[str], told: str
):
    """Neither is a lost host: whether the engine would refuse what is on its way is not known."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    world.faults["judge_samples"] = ["kill_engine"]
    world.faults["forget_engines"] = faults
    world.engines.engines["genrm", 0].hides = True
    word = ResolveRun(who="ada", why="I looked", confirm_released=True)
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("resolve", word)
        assert told in str(refused.value.cause)
        assert (await group(client, handle, "genrm.genrm")).state is GroupState.BLOCKED


async def test_a_person_s_word_reaches_a_stop_that_waits_for_proof(working: Working):
    """A host that burned while its engine slept; without the word nothing would end the run."""
    world = ScriptedWorld()
    judge = world.engines.engines["genrm", 0]
    judge.hides = judge.unreachable = True  # a stop alone has to prove anything here
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        assert "cannot stop genrm" in (await status(handle)).doing
        word = ResolveRun(who="ada", why="the node burned", confirm_released=True)
        await handle.execute_update("resolve", word)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    assert world.violations == []


async def test_the_evidence_of_a_release_whose_answer_was_lost_is_read(working: Working):
    world = ScriptedWorld(reconcile_timeout=0.5)
    world.faults["offload_engines"] = ["", "lose_reply", *["lose_reply"] * 3]
    world.faults["confirm_genrm_offload"] = ["", "refuse"]
    word = ResolveRun(who="ada", why="it is another's memory", confirm_released=True)
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        seen = await lease(client, handle)
        (role,) = [name for name, held in seen.roles.items() if held.state == "BLOCKED"]
        await handle.execute_update("resolve", word)
        done = await handle.result()
        ended = await lease(client, handle)
    assert done.state is RunState.DONE
    assert "RESOLVED_BY_OPERATOR" in events(ended, role)
    nothing_was_broken(world)
