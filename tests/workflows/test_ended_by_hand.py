"""Workflows of a run that somebody terminated: a person's word still frees what they held."""

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowUpdateFailedError

from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import LeaseState, ReplicaState, RunState
from tests.marks import wide
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_engines_that_fail import events, group
from tests.workflows.test_training_run import (
    EVERYBODY,
    Handle,
    Working,
    blocked,
    lease,
    nothing_was_broken,
    start,
    status,
)
from workflows import _mailbox
from workflows._lease_book import NUMBERS_PER_LEASE

pytestmark = pytest.mark.asyncio(loop_scope="session")
WORD = ResolveRun(who="ada", why="its node is off", confirm_released=True)
GROUP = ("genrm.genrm", "genrm.genrm.replica-0.recovery-1")


async def in_doubt(client: Client, world: ScriptedWorld) -> Handle:
    """A run whose judge died and hides, so that a person is needed."""
    world.faults["judge_samples"] = ["kill_engine"]
    world.engines.engines["genrm", 0].hides = True
    handle = await start(client, steps=1)
    await until(lambda: blocked(handle))
    return handle


async def terminate(client: Client, handle: Handle, *names: str) -> None:
    for name in names:
        await client.get_workflow_handle(f"{handle.id}.{name}").terminate("by hand")


async def paused(handle: Handle) -> bool:
    return (await status(handle)).state is RunState.PAUSED


async def has_ended(client: Client, handle: Handle, name: str) -> bool:
    told = await client.get_workflow_handle(f"{handle.id}.{name}").describe()
    return told.status is not WorkflowExecutionStatus.RUNNING


async def is_free(client: Client, handle: Handle) -> None:
    seen = await lease(client, handle)
    assert seen.roles["genrm"].state is LeaseState.SLEEPING
    assert events(seen, "genrm")[-1] == "RESOLVED_BY_OPERATOR"


async def test_a_word_reaches_the_engines_of_a_role_whose_workflow_is_gone(working: Working):
    """Its engine groups live on; they end what is left, and themselves."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    async with working(world) as client:
        handle = await in_doubt(client, world)
        await terminate(client, handle, "genrm")
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("resolve", WORD)
        assert "process 7 of it lives on this host" in str(refused.value.cause)
        assert (await lease(client, handle)).roles["genrm"].state is LeaseState.BLOCKED
        world.engines.end_all()
        await handle.execute_update("resolve", WORD)
        await is_free(client, handle)
        assert not world.engines.holds("genrm")
        await until(lambda: has_ended(client, handle, "genrm.genrm"))
    assert world.violations == []


async def test_a_word_is_taken_for_a_role_and_its_group_that_are_both_gone(working: Working):
    world = ScriptedWorld(reconcile_timeout=0.5)
    async with working(world) as client:
        handle = await in_doubt(client, world)
        await terminate(client, handle, "genrm", *GROUP)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("resolve", WORD)
        assert "process 7 of it lives on this host" in str(refused.value.cause)
        asked = world.calls["forget_engines"]
        world.engines.engines["genrm", 0].unreachable = True
        await handle.execute_update("resolve", WORD)
        assert world.calls["forget_engines"] == asked + 1, "its grant is closed in the store"
        await is_free(client, handle)


@pytest.mark.wide
async def test_a_group_that_is_gone_is_begun_anew_after_a_word(working: Working):
    world = ScriptedWorld(reconcile_timeout=0.5)
    async with working(world) as client:
        handle = await in_doubt(client, world)
        await terminate(client, handle, *GROUP)
        world.engines.end_all()
        await handle.execute_update("resolve", WORD)
        await is_free(client, handle)

        async def gave_up() -> bool:
            seen = await status(handle)
            return seen.state is RunState.BLOCKED and "cannot be asked to ready" in seen.doing

        await until(gave_up)
        await handle.execute_update("resolve", WORD.model_copy(update={"action": "restart"}))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.parametrize("at", ["generate_groups", *wide("judge_samples"), "train_step"])
async def test_a_lease_that_is_ended_in_a_phase_begins_anew(working: Working, at: str):
    """Every role lets go under a token above all earlier ones before anything is granted; the
    step is tried again, and what it had done is not done twice."""
    world = ScriptedWorld()
    world.faults[at] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=2)
        await world.held.wait()
        await terminate(client, handle, "lease")
        world.go_on.set()
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1, 2]
    assert [t.role for t in seen.transitions if t.event == "MEMORY_LOST"] == list(seen.roles)
    assert all(t.fence > NUMBERS_PER_LEASE for t in seen.transitions)
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_trainer_that_does_not_let_go_at_once_is_not_active_for_nobody(working: Working):
    """Its lease is gone and the first offload of the new one fails: a probe sees it up."""
    world = ScriptedWorld()
    world.faults["train_step"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        world.faults["offload_trainer"] = ["refuse"]
        await terminate(client, handle, "lease")
        world.go_on.set()
        done = await handle.result()
    assert not world.faults["offload_trainer"]
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_steps_that_overlap_survive_the_end_of_their_lease(working: Working):
    world = ScriptedWorld(apart=EVERYBODY, max_staleness=1)
    world.faults["generate_groups"] = ["", "hold"]
    async with working(world) as client:
        handle = await start(client, steps=4)
        await world.held.wait()
        await terminate(client, handle, "lease")
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1, 2, 3, 4]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_step_that_waits_for_a_lease_notices_its_end(working: Working):
    """Without an answer the same is asked again; nobody is there then."""
    world = ScriptedWorld()
    world.faults["onload_engines"] = ["", "", "", "hang"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        await terminate(client, handle, "lease")
        world.freed.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def test_a_word_for_a_lease_that_was_ended_begins_it_anew(working: Working):
    """What hides is in doubt for the new lease, too: it asks for a word of its own."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    async with working(world) as client:
        handle = await in_doubt(client, world)
        await terminate(client, handle, "lease")
        await handle.execute_update("resolve", WORD)
        await until(lambda: blocked(handle))
        assert (await lease(client, handle)).roles["genrm"].state is LeaseState.BLOCKED
        world.engines.end_all()
        await handle.execute_update("resolve", WORD)
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_word_reaches_a_role_that_was_ended_with_its_lease(working: Working):
    """The role told the lost lease what engines it has, and can tell nobody else any more."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    async with working(world) as client:
        handle = await in_doubt(client, world)
        await terminate(client, handle, "lease", "genrm")
        await handle.execute_update("resolve", WORD)
        await until(lambda: blocked(handle))
        world.engines.end_all()
        await handle.execute_update("resolve", WORD)
        await is_free(client, handle)
        assert not world.engines.holds("genrm")
        await until(lambda: has_ended(client, handle, "genrm.genrm"))
    assert world.violations == []


@pytest.mark.wide
async def test_a_lease_that_is_ended_while_roles_are_stopped_is_not_needed_any_more(
    working: Working,
):
    """One that began anew could not ask roles that are gone, and would keep their GPUs for ever."""
    world = ScriptedWorld()
    world.faults["stop_engines"] = ["hang"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        await terminate(client, handle, "lease")
        world.freed.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    assert not any(world.engines.holds(role) for role in ("rollout", "genrm", "teacher"))
    nothing_was_broken(world)


async def test_a_run_whose_lease_was_ended_is_stopped_with_proof(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=5)
        await until(lambda: 1 in world.ledger)
        await handle.execute_update("pause")
        await until(lambda: paused(handle))
        await terminate(client, handle, "lease")
        await handle.execute_update("stop")
        done = await handle.result()
    assert done.state is RunState.DONE
    assert not any(world.engines.holds(role) for role in ("rollout", "genrm", "teacher"))
    nothing_was_broken(world)


@pytest.mark.parametrize("at", ["stop_engines", *wide("launch_engines")])
async def test_a_recovery_that_is_ended_leaves_its_replica_in_doubt_and_a_probe_mends_it(
    working: Working, at: str
):
    """Whatever the recovery was doing; the lease hears of it, though it was not BLOCKED before."""
    world = ScriptedWorld(reconcile_timeout=60.0)
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        world.faults[at] = ["hang"]
        world.engines.engines["rollout", 1].die()
        await world.stuck.wait()
        await terminate(client, handle, "rollout.policy.replica-1.recovery-1")

        async def is_up() -> bool:
            replicas = (await group(client, handle)).replicas
            return [r.state for r in replicas] == [ReplicaState.READY] * 2

        await until(lambda: lease_was_told(client, handle))
        world.freed.set()
        await until(is_up)
        world.go_on.set()
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


async def lease_was_told(client: Client, handle: Handle) -> bool:
    return "OPERATION_FAILED" in events(await lease(client, handle), "rollout")


@pytest.mark.wide
async def test_a_role_that_is_ended_while_it_stops_is_stopped_after_a_word(
    working: Working, monkeypatch: pytest.MonkeyPatch
):
    """Its answer would never come: who waits looks from time to time whether anybody is there."""
    monkeypatch.setattr(_mailbox, "AGAIN", 1.0)
    world = ScriptedWorld()
    world.faults["stop_engines"] = ["hang"] * 3
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        await terminate(client, handle, "genrm")
        world.freed.set()
        await until(lambda: blocked(handle))
        assert "cannot stop genrm" in (await status(handle)).doing
        await handle.execute_update("resolve", WORD)
        assert (await handle.result()).state is RunState.DONE
    assert not world.engines.holds("genrm")
    nothing_was_broken(world)
