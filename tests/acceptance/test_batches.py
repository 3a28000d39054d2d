"""What must happen to a batch: the workflows decide, over activities in memory."""

import asyncio
import itertools

import pytest
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError

from relax_infer.contracts.lease import LeaseAnswer, LeaseCommand
from relax_infer.contracts.run import ResolveRun, batch_of
from relax_infer.machines import RunState
from tests.marks import wide
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_engines_that_fail import role_is
from tests.workflows.test_training_run import (
    Handle,
    Working,
    blocked,
    in_state,
    lease,
    nothing_was_broken,
    running,
    start,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

BATCH = batch_of(1, 1)
_NUMBERS = itertools.count()


async def ask(book: WorkflowHandle, method: str, **fields: object) -> LeaseAnswer:
    """One operation of the lease, under an id of its own."""
    command = LeaseCommand.model_validate({"operation_id": f"ada-{next(_NUMBERS)}", **fields})
    return await book.execute_update(method, command, result_type=LeaseAnswer)


async def refusal(book: WorkflowHandle, method: str, **fields: object) -> str:
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await ask(book, method, **fields)
    return str(refused.value.cause)


def lease_of(client: Client, handle: Handle) -> WorkflowHandle:
    return client.get_workflow_handle(f"{handle.id}.lease")


async def nothing_may_be_trained_on(client: Client, handle: Handle, world: ScriptedWorld) -> None:
    """Neither was anything trained, nor would the lease grant the GPUs for it."""
    book = lease_of(client, handle)
    assert world.ledger == {}
    assert BATCH in await refusal(book, "acquire", role="trainer", purpose="train", batch=BATCH)
    assert "failed" in await refusal(book, "commit_batch", batch=BATCH)


async def failure(client: Client, handle: Handle) -> str:
    """Why the batch failed; no role holds a GPU then."""

    async def failed() -> bool:  # a lease that is BLOCKED has its run wait before the step gives up
        seen = await lease(client, handle)
        return seen.batch is not None and seen.batch.state == "FAILED"

    await until(lambda: blocked(handle))
    await until(failed, seconds=150)
    await until(lambda: blocked(handle))
    seen = await lease(client, handle)
    assert seen.batch is not None
    assert (seen.batch.batch, seen.holders) == (BATCH, ())
    return seen.batch.error or ""


@pytest.mark.parametrize("name", ["judge_samples", "teach_samples", *wide("write_back_scores")])
async def test_scoring_or_validation_fails(working: Working, name: str):
    world = ScriptedWorld()
    world.faults[name] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        assert f"{name} refused" in await failure(client, handle)
        assert (world.calls["publish_batch"], world.calls["finalise_batch"]) == (0, 0)
        assert world.partitions == set()
        await nothing_may_be_trained_on(client, handle, world)
    assert world.violations == []


@pytest.mark.parametrize("lets_go", ["at once", *wide("soon", "after a person was called")])
async def test_producer_fails_after_the_batch_began(working: Working, lets_go: str):
    """The policy's engines let go all the same; unless that is proved the lease stays reserved."""
    world = ScriptedWorld(reconcile_timeout=5.0 if lets_go == "soon" else 0.2)
    world.faults["generate_groups"] = ["hang", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        if lets_go != "at once":
            world.engines.engines["rollout", 0].hides = True
            world.faults["offload_engines"] = ["wedge"]
        world.freed.set()
        if lets_go != "at once":
            await until(lambda: role_is(client, handle, "rollout", "BLOCKED"))
            if lets_go != "soon":
                await until(lambda: blocked(handle))
            seen = await lease(client, handle)
            assert seen.batch is not None
            assert (seen.batch.state, seen.batch.rollout_released) == ("PENDING", False)
            assert "leases held by rollout (BLOCKED)" in await refusal(
                lease_of(client, handle), "activate", role="genrm"
            )
            world.engines.engines["rollout", 0].hides = False
        assert "generate_groups refused" in await failure(client, handle)
        assert not world.engines.holds("rollout")
        await nothing_may_be_trained_on(client, handle, world)
    assert world.violations == []


async def test_student_restore_fails(working: Working):
    """The policy lets go and that is acknowledged all the same; a repeat wakes nobody up."""
    world = ScriptedWorld(reconcile_timeout=1.0)
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        book = lease_of(client, handle)
        await ask(book, "begin_batch", batch="mine")
        await ask(book, "acknowledge_rollout_offloaded", batch="mine")
        loads = world.log.count(("rollout", "onload"))
        await ask(book, "begin_batch", batch="mine")
        assert world.log.count(("rollout", "onload")) == loads
        world.faults["onload_engines"] = ["refuse"] * 3
        assert "onload_engines refused" in await refusal(
            book, "begin_student_scoring", batch="mine"
        )
        await ask(book, "acknowledge_rollout_offloaded", batch="mine")
        seen = await lease(client, handle)
        assert seen.batch is not None
        assert (seen.holders, seen.batch.rollout_released) == ((), True)
        assert not world.engines.holds("rollout")
        world.faults["onload_engines"] = []
        await ask(book, "begin_student_scoring", batch="mine")
        assert not world.engines.holds("rollout")
        # What somebody was granted since is not ended by an acknowledgement that comes once more.
        await ask(book, "activate", role="rollout", batch="mine")
        await ask(book, "acknowledge_rollout_offloaded", batch="mine")
        assert (await lease(client, handle)).holders == ("rollout",)
        await ask(book, "deactivate", role="rollout", batch="mine")
        await ask(book, "fail_batch", batch="mine", message="the student could not be restored")
    assert world.violations == []


async def test_transferqueue_put_fails(working: Working):
    """No commit; who waits for it hears why and leaves, also who asks when it was given up."""
    world = ScriptedWorld()
    world.faults["publish_batch"] = ["hang", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        book = lease_of(client, handle)
        waiting = asyncio.create_task(refusal(book, "wait_committed", batch=BATCH))
        await until(lambda: waits(book))
        world.freed.set()
        told = await waiting
        while "ask again" in told:
            told = await refusal(book, "wait_committed", batch=BATCH)
        assert f"batch {BATCH} failed" in told
        assert "publish_batch refused" in told
        assert "publish_batch refused" in await failure(client, handle)
        assert world.calls["finalise_batch"] == 0
        await nothing_may_be_trained_on(client, handle, world)
        await handle.execute_update("resolve", ResolveRun(who="ada", why="it is back"))
        await until(lambda: world.calls["generate_groups"] > 1)
        assert "publish_batch refused" in await refusal(book, "wait_committed", batch=BATCH)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


async def waits(book: WorkflowHandle) -> bool:
    """Somebody's update is in the lease's history."""
    events = [event async for event in book.fetch_history_events()]
    return any(e.HasField("workflow_execution_update_accepted_event_attributes") for e in events)


@pytest.mark.parametrize("cleared", [True, *wide(False)])
async def test_finaliser_fails_after_the_put(working: Working, cleared: bool):
    """The partition is taken back, and it is the finaliser's failure that is told."""
    world = ScriptedWorld()
    world.faults["finalise_batch"] = ["refuse"]
    world.faults["clear_partition"] = [] if cleared else ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        told = await failure(client, handle)
        assert "finalise_batch refused" in told
        assert ("clear_partition refused" in told) == (not cleared)
        assert world.calls["clear_partition"] == 1
        assert (world.partitions == set()) == cleared
        await nothing_may_be_trained_on(client, handle, world)
        await handle.execute_update("resolve", ResolveRun(who="ada", why="disk is free again"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)
