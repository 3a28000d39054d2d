"""What a person's word may meet: it is carried out, or refused with the reason and asked again."""

import asyncio
from itertools import combinations

import pytest
from temporalio.client import WorkflowUpdateFailedError

from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import RunState
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import (
    Handle,
    Working,
    blocked,
    in_state,
    nothing_was_broken,
    running,
    start,
    status,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

APART = tuple(combinations(("rollout", "genrm", "teacher", "trainer"), 2))
RETRY = ResolveRun(who="ada", why="looked at it")
GONE = RETRY.model_copy(update={"confirm_released": True})
RESTART = RETRY.model_copy(update={"action": "restart"})


async def is_refused(handle: Handle, word: ResolveRun, why: str) -> None:
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update("resolve", word)
    assert why in str(refused.value.cause)


async def waits_for(handle: Handle, what: str) -> bool:
    seen = await status(handle)
    return seen.state is RunState.BLOCKED and what in seen.doing


@pytest.mark.parametrize("word", [RETRY, GONE], ids=["it can be asked again", "nothing is left"])
async def test_a_trainer_that_cannot_be_stopped_is_asked_again_after_a_person_has_looked(
    working: Working, word: ResolveRun
):
    world = ScriptedWorld()
    world.faults["stop_trainer"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: waits_for(handle, "cannot stop the trainer"))
        await handle.execute_update("stop")  # it ends anyway; the word is still needed
        await handle.execute_update("resolve", word)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert world.calls["stop_trainer"] == 2
    assert world.calls["forget_trainer"] == (1 if word.confirm_released else 0)
    nothing_was_broken(world)


async def test_a_role_whose_workflow_was_terminated_is_gone_by_a_persons_word_alone(
    working: Working,
):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: running(handle))
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        await client.get_workflow_handle(f"{handle.id}.genrm").terminate("by hand")
        await handle.execute_update("stop")
        for word in (RETRY, GONE):
            await until(lambda: waits_for(handle, "cannot stop genrm"))
            await handle.execute_update("resolve", word)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert ("genrm", 0) in world.engines.stops, "its engines do not outlive the run"
    assert not world.engines.holds("genrm")


async def test_a_restart_that_fails_leaves_the_run_waiting_for_the_next_word(working: Working):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        world.faults["onload_trainer"] = ["refuse"]
        await handle.execute_update("resolve", RESTART)
        await until(lambda: waits_for(handle, "the word of ada was not carried out"))
        assert "onload_trainer refused" in (await status(handle)).doing
        await handle.execute_update("resolve", RESTART)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


async def test_one_word_goes_for_every_step_that_gave_up(working: Working):
    world = ScriptedWorld(apart=APART, max_staleness=1)
    world.faults["train_step"] = ["hold", "refuse"]
    world.faults["judge_samples"] = ["", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=3)
        await world.held.wait()
        await until(lambda: waits_for(handle, "judge_samples refused"))
        world.go_on.set()
        await until(lambda: waits_for(handle, "train_step refused"))
        await is_refused(handle, RESTART, "steps 1, 2 are open")
        await handle.execute_update("resolve", RETRY)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1, 2, 3]
    nothing_was_broken(world)


async def test_a_word_for_a_step_and_for_a_lease_that_does_not_wait_any_more_is_one_word(
    working: Working,
):
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        await handle.signal("lease_blocked", "rollout: no engine of policy is left")
        await handle.execute_update("resolve", GONE)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_roles_are_not_restarted_while_only_gpus_are_in_doubt(working: Working):
    world = ScriptedWorld()
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        word = GONE.model_copy(update={"action": "restart"})
        await is_refused(handle, word, "no step waits for a word")
        world.engines.end_all()
        await handle.execute_update("resolve", GONE)
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_word_and_the_proof_that_came_while_it_was_said_are_one(working: Working):
    """The recovery has ended when the word is passed on to it."""
    world = ScriptedWorld(reconcile_timeout=0.5)
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    world.faults["forget_engines"] = ["hang"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        said = asyncio.create_task(handle.execute_update("resolve", GONE))
        await world.stuck.wait()
        world.engines.end_all()
        recovery = client.get_workflow_handle(f"{handle.id}.genrm.genrm.replica-0.recovery-1")
        await recovery.result()
        world.freed.set()
        await said
        assert (await handle.result()).state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)
