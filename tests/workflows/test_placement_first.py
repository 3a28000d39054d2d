"""The plan is made and bound before anything else of a run exists, and a person can read it."""

import uuid

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.run import RunStatus
from relax_infer.machines import RunState
from tests.workflows.scripted_world import ScriptedWorld, plan
from tests.workflows.test_training_run import Working, nothing_was_broken, start
from workflows._visible import placement_rows

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEDULED = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
CHILD = EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED


async def test_a_run_plans_and_binds_before_any_engine_router_or_data_source(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=1)
        await handle.result()
        events = (await handle.fetch_history()).events
    begun = [
        event.activity_task_scheduled_event_attributes.activity_type.name
        if event.event_type == SCHEDULED
        else event.start_child_workflow_execution_initiated_event_attributes.workflow_type.name
        for event in events
        if event.event_type in (SCHEDULED, CHILD)
    ]
    assert begun[:3] == ["resolve_recipe", "bind_placement", "GpuLease"]


async def test_a_placement_that_is_refused_leaves_nothing_begun(working: Working):
    world = ScriptedWorld()
    world.faults["bind_placement"] = ["refuse"]
    async with working(world) as client:
        with pytest.raises(WorkflowFailureError) as failed:
            await (await start(client, steps=1)).result()
    assert "bind_placement refused" in str(failed.value.cause)
    assert world.calls["release_placement"] == 1
    assert {"ensure_front", "open_transfer_queue", "onload_engines"} & set(world.calls) == set()


async def test_a_stop_while_gpus_are_bound_ends_the_run_done(working: Working):
    """What cannot be brought up any more is no failure of a run that was to stop anyway."""
    world = ScriptedWorld()
    world.faults["bind_placement"] = ["hold", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        await handle.execute_update("stop")
        world.go_on.set()
        status = await handle.result()
    assert status.state is RunState.DONE
    assert status.step == 0
    assert world.calls["release_placement"] == 1
    assert "onload_engines" not in world.calls


@pytest.mark.wide
async def test_current_details_say_who_has_which_gpus(working: Working):
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=1)
        await handle.result()
        shown = await handle.query("__temporal_workflow_metadata")
    details = str(shown["currentDetails"] if isinstance(shown, dict) else shown.current_details)
    assert "| GPUs of rollout policy | 127.0.0.1: 0, 1 |" in details


async def test_gpus_are_told_node_by_node_and_of_many_nodes_the_first():
    bundles = tuple(
        BundleBinding(bundle=k, node_id=f"n{k // 2}", node_ip=f"10.0.0.{k // 2}", gpu_id=k % 2)
        for k in range(10)
    )
    made = plan("run")
    assert placement_rows(made) == []
    groups = (made.groups[0].model_copy(update={"bundles": bundles}), *made.groups[1:])
    trainer = made.trainer.model_copy(update={"bundles": bundles[:3]})
    assert placement_rows(made.model_copy(update={"groups": groups, "trainer": trainer})) == [
        (
            "GPUs of rollout policy",
            "10.0.0.0: 0, 1; 10.0.0.1: 0, 1; 10.0.0.2: 0, 1; 10.0.0.3: 0, 1; and on 1 more node",
        ),
        ("GPUs of trainer", "10.0.0.0: 0, 1; 10.0.0.1: 0"),
    ]


async def test_a_stop_while_a_role_is_brought_up_spares_the_others(working: Working):
    world = ScriptedWorld()
    world.faults["onload_engines"] = ["hang"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.stuck.wait()
        told = await handle.execute_update("stop", result_type=RunStatus)
        world.freed.set()
        status = await handle.result()
    assert "before its first step" in told.doing
    assert (status.state, status.step) == (RunState.DONE, 0)
    assert [role for role, what in world.log if what == "onload"] == ["genrm"]
    nothing_was_broken(world)


async def test_a_run_that_was_started_without_an_input_ends_at_once_and_says_what_to_give(
    working: Working,
):
    async with working(ScriptedWorld()) as client:
        handle = await client.start_workflow(
            "TrainingRun", id=f"run-{uuid.uuid4().hex[:8]}", task_queue="relax"
        )
        with pytest.raises(WorkflowFailureError) as failed:
            await handle.result()
    assert "--input" in str(failed.value.cause)
