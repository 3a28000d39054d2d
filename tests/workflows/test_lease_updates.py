"""Clients of the lease itself: one operation twice, waits for a commit, a batch given up."""

import asyncio
from itertools import count

import pytest
from temporalio.client import (
    Client,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.engines import EngineOperation, GroupReport
from relax_infer.contracts.lease import LeaseAnswer, LeaseCommand, LeaseStatus
from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import BatchState, LeaseState, RunState
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_schedules import DECOUPLED
from tests.workflows.test_training_run import (
    Handle,
    Working,
    in_state,
    lease,
    nothing_was_broken,
    start,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
Lease = WorkflowHandle[object, LeaseStatus]


def lease_of(client: Client, handle: Handle) -> Lease:
    return client.get_workflow_handle(f"{handle.id}.lease", result_type=LeaseStatus)


async def ask(at: Lease, method: str, operation_id: str, **fields: object) -> LeaseAnswer:
    command = LeaseCommand.model_validate({"operation_id": operation_id, **fields})
    return await at.execute_update(method, command, result_type=LeaseAnswer)


def kind(error: WorkflowUpdateFailedError) -> str | None:
    assert isinstance(error.cause, ApplicationError)
    return error.cause.type


async def test_the_same_operation_asked_twice_at_once_is_carried_out_once(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: world.calls["generate_groups"])
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        at, loads = lease_of(client, handle), world.log.count(("genrm", "onload"))
        world.faults["onload_engines"] = ["hang"]
        mine = {"role": "genrm", "purpose": "eval"}
        both = [asyncio.create_task(ask(at, "acquire", "ada-1", **mine)) for _ in range(2)]
        await world.stuck.wait()
        world.freed.set()
        first, second = await asyncio.gather(*both)
        assert first == second
        assert first == await ask(at, "acquire", "ada-1", **mine)
        assert world.log.count(("genrm", "onload")) == loads + 1
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await ask(at, "acquire", "ada-1", role="teacher", purpose="eval")
        assert "different fingerprint" in str(refused.value.cause)
        await ask(at, "release", "ada-2", role="genrm")
        await handle.execute_update("resume")
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_fifth_who_waits_for_a_commit_is_refused(working: Working):
    world = ScriptedWorld()
    world.faults["evaluate_policy"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        at = lease_of(client, handle)
        waits = [
            await at.start_update(
                "wait_committed",
                LeaseCommand(operation_id=f"rank-{rank}", batch="step-9"),
                wait_for_stage=WorkflowUpdateStage.ACCEPTED,
            )
            for rank in range(4)
        ]
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await ask(at, "wait_committed", "rank-4", batch="step-9")
        assert "4 callers wait already" in str(refused.value.cause)
        for each in waits:
            with pytest.raises(WorkflowUpdateFailedError) as late:
                await each.result()
            assert kind(late.value) == "Transient"
        world.go_on.set()
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


async def test_a_commit_is_waited_for_before_its_batch_begins(working: Working):
    world = ScriptedWorld()
    world.faults["evaluate_policy"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        at = lease_of(client, handle)
        assert (await lease(client, handle)).batch is None
        with pytest.raises(WorkflowUpdateFailedError) as late:
            await ask(at, "wait_committed", "rank-0", batch="step-1")
        assert kind(late.value) == "Transient"
        assert (await lease(client, handle)).batch is None
        world.faults["train_step"] = ["hang"]
        world.go_on.set()
        numbers = count(1)

        async def committed() -> bool:
            try:
                await ask(at, "wait_committed", f"rank-0.{next(numbers)}", batch="step-1")
            except WorkflowUpdateFailedError as late:
                return kind(late) != "Transient"
            return True

        await until(committed)
        batch = (await lease(client, handle)).batch
        assert batch is not None
        assert (batch.batch, batch.state) == ("step-1", BatchState.COMMITTED)
        world.freed.set()
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_batch_is_given_up_while_another_role_is_in_doubt(
    working: Working, monkeypatch: pytest.MonkeyPatch
):
    world = ScriptedWorld(apart=DECOUPLED, reconcile_timeout=60.0)
    for role, phase in (("genrm", "judge_samples"), ("teacher", "teach_samples")):
        world.engines.engines[role, 0].hides = True
        world.faults[phase] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=1)

        async def in_doubt(*roles: str) -> bool:
            seen = (await lease(client, handle)).roles
            return {r for r in seen if seen[r].state is LeaseState.BLOCKED} == set(roles)

        await until(lambda: world.calls["judge_samples"] and world.calls["teach_samples"])
        await until(lambda: in_doubt("genrm", "teacher"))
        forget = world.engines.forget

        def looked(operation: EngineOperation) -> GroupReport:
            """Not before the word is carried out: else a probe could be faster."""
            world.engines.engines["teacher", 0].hides = False
            return forget(operation)

        monkeypatch.setattr(world.engines, "forget", looked)
        word = {"who": "ada", "why": "not worth it", "confirm_released": True, "abandon": True}
        await ask(lease_of(client, handle), "resolve", "ada-1", role="teacher", **word)
        seen = await lease(client, handle)
        assert seen.batch is None
        assert seen.roles["genrm"].state is LeaseState.BLOCKED
        world.engines.engines["genrm", 0].hides = False
        await until(lambda: in_state(handle, RunState.BLOCKED))
        await handle.execute_update("resolve", ResolveRun(who="ada", why="again"))
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)
