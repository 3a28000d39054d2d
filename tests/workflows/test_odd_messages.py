"""Messages that nobody of ours sends: a run goes on, or says what it waits for."""

import pytest
from temporalio.client import WorkflowUpdateFailedError

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.run import ResolveRun, RunStatus
from relax_infer.machines import GROUP, RunState
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import (
    Working,
    blocked,
    in_state,
    nothing_was_broken,
    running,
    start,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
WORD = ResolveRun(who="ada", why="looked", confirm_released=True)


@pytest.mark.parametrize("asker", ["", "x" * 5000])
async def test_an_asker_that_nobody_can_answer_is_dropped(working: Working, asker: str):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: running(handle))
        for name in ("lease", "rollout", "rollout.policy"):
            await client.get_workflow_handle(f"{handle.id}.{name}").signal(
                "ask",
                {"operation_id": "o", "asker": asker, "method": "reconcile", "payload": {}},
            )
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


async def test_news_of_a_group_or_a_holder_that_is_not_there_change_nothing(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: running(handle))
        ghost = GroupSnapshot(
            role="rollout", model="ghost", state=GROUP.initial, weight_source="STATIC"
        )
        await client.get_workflow_handle(f"{handle.id}.rollout").signal("group_changed", ghost)
        await client.get_workflow_handle(f"{handle.id}.lease").signal(
            "holder_lost", {"role": "student", "why": "nonsense"}
        )
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_run_that_was_told_nonsense_of_its_lease_goes_on_at_a_persons_word(
    working: Working,
):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        await handle.signal("lease_blocked", "nonsense")
        await until(lambda: in_state(handle, RunState.BLOCKED))
        await handle.execute_update("resolve", WORD)
        assert (await handle.result()).state is RunState.DONE
    assert sorted(world.ledger) == [1, 2]


async def test_a_run_that_was_stopped_while_its_lease_waits_still_takes_the_word_for_it(
    working: Working,
):
    world = ScriptedWorld()
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: blocked(handle))
        told = await handle.execute_update("stop", result_type=RunStatus)
        assert told.state is RunState.STOPPING
        assert "a person must still say" in told.doing
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update("resolve", WORD.model_copy(update={"why": " "}))
        world.engines.end_all()
        await handle.execute_update("resolve", WORD)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert done.step <= 1


@pytest.mark.parametrize(("asked", "state"), [("stop", "STOPPING"), ("pause", "PAUSING")])
async def test_what_was_asked_before_the_lease_had_to_wait_is_heeded_after_it(
    working: Working, asked: str, state: str
):
    """The lease healed by itself and the run went on to its next step, though it was stopped."""
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=3)
        await world.held.wait()
        told = await handle.execute_update(asked, result_type=RunStatus)
        assert told.state == state
        await handle.signal("lease_blocked", "rollout: its node burns")
        await until(lambda: in_state(handle, RunState.BLOCKED))
        await handle.signal("lease_unblocked", "")
        await until(lambda: in_state(handle, RunState(state)))
        world.go_on.set()
        if asked == "pause":
            await until(lambda: in_state(handle, RunState.PAUSED))
            await handle.execute_update("stop")
        done = await handle.result()
    assert (done.state, done.step) == (RunState.DONE, 1)
    assert sorted(world.ledger) == [1]


@pytest.mark.wide
async def test_a_step_that_waits_for_a_word_waits_on_when_a_lease_needs_none_any_more(
    working: Working,
):
    """Both may wait for a person at once; the lease may be proved right by itself."""
    world = ScriptedWorld()
    world.faults["judge_samples"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        await handle.signal("lease_blocked", "rollout: no engine of policy is left")
        await handle.signal("lease_unblocked", "")

        async def waits_on() -> bool:
            seen = await handle.query("status", result_type=RunStatus)
            assert seen.state is RunState.BLOCKED
            return seen.doing == "waits for a person: step 1: judge_samples refused"

        await until(waits_on)
        await handle.execute_update("resolve", WORD.model_copy(update={"confirm_released": False}))
        assert (await handle.result()).state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_paused_run_says_what_its_lease_waits_for_and_waits_for_it_when_resumed(
    working: Working,
):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        await handle.signal("lease_blocked", "rollout: its node burns")

        async def is_told(text: str) -> bool:
            seen = await handle.query("status", result_type=RunStatus)
            assert seen.state is RunState.PAUSED
            return text in seen.doing

        await until(lambda: is_told("its node burns"))
        await handle.signal("lease_unblocked", "")
        await until(lambda: is_told("relax-infer resume"))
        await handle.signal("lease_blocked", "rollout: its node burns")
        await until(lambda: is_told("its node burns"))
        told = await handle.execute_update("resume", result_type=RunStatus)
        assert (told.state, "its node burns" in told.doing) == (RunState.BLOCKED, True)
        await handle.signal("lease_unblocked", "")
        assert (await handle.result()).state is RunState.DONE
    assert sorted(world.ledger) == [1, 2]
