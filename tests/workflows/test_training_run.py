"""What a run does when all goes well, and when answers are lost, over the scripted world."""

import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import combinations
from typing import Any

import pytest
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)

from relax_infer.contracts.lease import LeaseAnswer, LeaseStatus, RoleCommand
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import ResolveRun, RunInput, RunStatus
from relax_infer.machines import RunState, StepPhase
from tests.marks import wide
from tests.workflows.scripted_world import ScriptedWorld, until

pytestmark = pytest.mark.asyncio(loop_scope="session")
Working = Callable[[ScriptedWorld], AbstractAsyncContextManager[Client]]
Handle = WorkflowHandle[object, RunStatus]
EVERYBODY = tuple(combinations(("rollout", "genrm", "teacher", "trainer"), 2))


async def start(client: Client, **fields: object) -> Handle:
    run = f"run-{uuid.uuid4().hex[:8]}"
    document = {"recipe": "scripted", **fields}
    return await client.start_workflow(
        "TrainingRun",
        RunInput.model_validate(document),
        id=run,
        task_queue="relax",
        result_type=RunStatus,
    )


async def status(handle: Handle) -> RunStatus:
    return await handle.query("status", result_type=RunStatus)


async def lease(client: Client, handle: Handle) -> LeaseStatus:
    return await client.get_workflow_handle(f"{handle.id}.lease").query(
        "state", result_type=LeaseStatus
    )


def nothing_was_broken(world: ScriptedWorld) -> None:
    assert world.violations == []
    assert not any(e.holds for e in world.engines.engines.values())
    assert not world.engines.trainer_holds
    assert world.partitions == set()


async def test_a_run_goes_from_recipe_to_last_step_and_leaves_nothing(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert done.step == 2
    assert done.weight_version == 2
    assert [p.step for p in done.progress] == [0, 1, 2]
    assert sorted(world.ledger) == [1, 2]
    assert world.records[2].record.outcome is StepPhase.DONE
    nothing_was_broken(world)


@pytest.mark.parametrize("ahead", [{}, *wide({"apart": EVERYBODY, "max_staleness": 1})])
async def test_a_run_goes_on_from_anothers_step(working: Working, ahead: dict[str, Any]):
    """Its first batch is generated with the weights that it took over, and nothing is synced
    before."""
    weights = WeightsRef(version=3, uri="/store/later/weights/3", digest="d3")
    world = ScriptedWorld(begins_after=3, initial_weights=weights, **ahead)
    async with working(world) as client:
        done = await (await start(client, steps=5)).result()
    assert done.state is RunState.DONE
    assert [p.step for p in done.progress] == [4, 5]
    assert sorted(world.ledger) == [4, 5]
    assert world.generated[4] == 3
    assert done.weight_version == 5
    nothing_was_broken(world)


async def test_a_step_passes_the_gpus_in_the_promised_order(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        await (await start(client, steps=1)).result()
    first = world.log.index(("rollout", "generate_groups")) - 1
    assert world.log[first : first + 13] == [
        ("rollout", "onload"),
        ("rollout", "generate_groups"),
        ("rollout", "offload"),
        ("genrm", "onload"),
        ("genrm", "judge_samples"),
        ("genrm", "offload"),
        ("teacher", "onload"),
        ("teacher", "teach_samples"),
        ("teacher", "offload"),
        ("trainer", "onload"),
        ("trainer", "train 1"),
        ("trainer", "offload"),
        ("rollout", "onload"),
    ]


async def test_a_role_is_unpublished_before_it_lets_go(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        await (await start(client, steps=1)).result()
    states = [
        model["state"]
        for push in world.pushes
        if push.role == "genrm"
        for model in push.document["models"].values()  # type: ignore[attr-defined]
    ]
    assert states[:6] == ["READY", "DRAINING", "SLEEPING"] * 2


@pytest.mark.wide
async def test_lost_replies_cost_nothing_but_repeats(working: Working):
    """Of every activity that has an engine, the trainer or a phase do something: twice each."""
    world = ScriptedWorld()
    names = ("onload_engines", "offload_engines", "onload_trainer", "offload_trainer")
    phases = ("generate_groups", "judge_samples", "teach_samples", "train_step", "evaluate_policy")
    for name in (*names, *phases):
        world.faults[name] = ["", "lose_reply", "lose_reply"]
    async with working(world) as client:
        done = await (await start(client, steps=2)).result()
    assert not any(world.faults.values())
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1, 2]
    nothing_was_broken(world)


async def test_a_blocked_lease_waits_for_a_person_and_the_batch_stays_pending(working: Working):
    world = ScriptedWorld()
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        seen = await lease(client, handle)
        assert seen.batch is not None
        assert seen.batch.state == "PENDING"
        assert seen.holder is not None
        assert seen.roles[seen.holder].state == "BLOCKED"
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("resolve", ResolveRun(who="ada", why="looked"))
        assert "confirm_released" in str(refused.value.cause)
        world.engines.end_all()
        await handle.execute_update(
            "resolve", ResolveRun(who="ada", why="no process left", confirm_released=True)
        )
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]


async def blocked(handle: Handle) -> bool:
    return (await status(handle)).state is RunState.BLOCKED


@pytest.mark.wide
@pytest.mark.parametrize("name", ["judge_samples", "write_back_scores", "publish_batch"])
async def test_a_batch_that_cannot_be_scored_is_not_trained_on(working: Working, name: str):
    world = ScriptedWorld()
    world.faults[name] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        seen = await status(handle)
        assert f"{name} refused" in (seen.error or "")
        assert world.ledger == {}
        held = await lease(client, handle)
        assert held.holder is None
        assert held.batch is not None
        assert held.batch.state == "FAILED"
        await handle.execute_update("resolve", ResolveRun(who="ada", why="judge is back"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


@pytest.mark.parametrize("name", ["train_step", *wide("clear_partition", "evaluate_policy")])
async def test_a_step_that_gave_up_after_its_commit_is_tried_again(working: Working, name: str):
    """Its batch is committed for good; the next attempt has one of its own and trains once."""
    world = ScriptedWorld()
    world.faults[name] = ["", "refuse"] if name == "evaluate_policy" else ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: blocked(handle))
        await handle.execute_update("resolve", ResolveRun(who="ada", why="mended"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1, 2]
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_person_may_stop_a_run_whose_lease_is_blocked(working: Working):
    world = ScriptedWorld()
    world.engines.engines["genrm", 0].hides = True
    world.faults["judge_samples"] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: blocked(handle))
        world.engines.end_all()
        await handle.execute_update(
            "resolve",
            ResolveRun(who="ada", why="no process left", action="stop", confirm_released=True),
        )
        done = await handle.result()
    assert done.state is RunState.DONE
    assert done.step == 1


async def test_a_front_that_moved_is_published_at_its_new_address(working: Working):
    world = ScriptedWorld()
    world.moves_front_at_push = 3
    async with working(world) as client:
        await (await start(client, steps=1)).result()
    routers = [
        model["router_url"]
        for push in world.pushes
        if push.role == "rollout"
        for model in push.document["models"].values()  # type: ignore[attr-defined]
    ]
    assert routers[-1] == world.front.router_url


async def test_rows_that_are_lost_with_their_queue_are_put_back_and_trained_on_once(
    working: Working,
):
    world = ScriptedWorld()
    world.faults["train_step"] = ["lose_rows", "lose_rows"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert (world.calls["train_step"], world.calls["publish_batch"]) == (3, 3)
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


async def test_a_failed_finaliser_takes_the_partition_back_and_blocks_the_commit(working: Working):
    world = ScriptedWorld()
    world.faults["finalise_batch"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await until(lambda: blocked(handle))
        assert world.partitions == set()
        assert world.ledger == {}
        await handle.execute_update("resolve", ResolveRun(who="ada", why="no", action="stop"))
        done = await handle.result()
    assert done.step == 0
    nothing_was_broken(world)


async def test_a_run_pauses_after_its_step_and_goes_on(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: running(handle))
        await handle.execute_update("pause", result_type=RunStatus)
        await until(lambda: in_state(handle, RunState.PAUSED))
        trained = len(world.ledger)
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("pause", result_type=RunStatus)
        assert "cannot pause now; what can be asked: resume, stop" in str(refused.value.cause)
        assert len(world.ledger) == trained
        await handle.execute_update("resume", result_type=RunStatus)
        done = await handle.result()
    assert done.step == 3


async def test_a_person_uses_a_role_of_a_paused_run_under_the_lease(working: Working):
    """What an operator does to look at the judge between two steps."""
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        await handle.execute_update("pause", result_type=RunStatus)
        await until(lambda: in_state(handle, RunState.PAUSED))
        judge = client.get_workflow_handle(f"{handle.id}.genrm")
        policy = client.get_workflow_handle(f"{handle.id}.rollout")
        mine = RoleCommand(operation_id="ada-1")
        granted = await judge.execute_update("onload", mine, result_type=LeaseAnswer)
        assert granted.fence is not None
        assert (await lease(client, handle)).holder == "genrm"
        assert await judge.execute_update("onload", mine, result_type=LeaseAnswer) == granted
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await policy.execute_update("onload", RoleCommand(operation_id="eve-1"))
        assert "leases held by genrm" in str(refused.value.cause)
        released = await judge.execute_update(
            "offload", RoleCommand(operation_id="ada-2"), result_type=LeaseAnswer
        )
        assert released.evidence
        assert (await lease(client, handle)).holder is None
        await handle.execute_update("resume", result_type=RunStatus)
        done = await handle.result()
    assert done.step == 2
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_target_may_be_raised_but_not_below_what_is_done(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update("set_target_steps", -1, result_type=RunStatus)
        await handle.execute_update("set_target_steps", 4, result_type=RunStatus)
        done = await handle.result()
    assert done.step == 4


@pytest.mark.wide
async def test_a_target_that_is_given_before_the_recipe_is_read_stands(working: Working):
    world = ScriptedWorld()
    world.faults["resolve_recipe"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=5)
        await world.held.wait()
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("set_target_steps", 0, result_type=RunStatus)
        assert "0 is no target" in str(refused.value.cause)
        await handle.execute_update("set_target_steps", 1, result_type=RunStatus)
        world.go_on.set()
        done = await handle.result()
    assert (done.step, done.target) == (1, 1)


async def running(handle: Handle) -> bool:
    return await in_state(handle, RunState.RUNNING)


async def in_state(handle: Handle, state: RunState) -> bool:
    return (await status(handle)).state is state


async def test_five_continue_as_news_keep_lease_and_roles(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=5, steps_per_history=1)
        await until(lambda: running(handle))
        ids = [f"{handle.id}.{name}" for name in ("lease", "rollout", "genrm", "rollout.policy")]
        before = [(await client.get_workflow_handle(i).describe()).run_id for i in ids]
        await until(lambda: len(world.ledger) >= 5)
        after = [(await client.get_workflow_handle(i).describe()).run_id for i in ids]
        done = await handle.result()
        listed = client.list_workflows(f"WorkflowId = '{handle.id}'")
        histories = [found.id async for found in listed]
    assert before == after
    assert len(histories) == 6
    assert done.step == 5
    assert done.gateway_url is None, "it is gone with the run"
    assert done.progress[-1].step == 5
    assert world.calls["bind_placement"] == 1
    nothing_was_broken(world)


async def test_a_recipe_that_cannot_be_read_ends_the_run_with_its_reason(working: Working):
    world = ScriptedWorld()
    world.faults["resolve_recipe"] = ["refuse"]
    async with working(world) as client:
        with pytest.raises(WorkflowFailureError) as failed:
            await (await start(client, steps=1)).result()
    assert "resolve_recipe refused" in str(failed.value.cause)


async def test_a_role_that_cannot_load_ends_the_run_and_everything_is_taken_down(working: Working):
    world = ScriptedWorld()
    world.faults["onload_trainer"] = ["refuse"]
    async with working(world) as client:
        with pytest.raises(WorkflowFailureError) as failed:
            await (await start(client, steps=1)).result()
    assert "onload_trainer refused" in str(failed.value.cause)
    assert world.calls["release_placement"] == 1
    nothing_was_broken(world)
