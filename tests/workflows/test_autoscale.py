"""Replicas by load: what a policy does to a role, and who goes before it."""

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from relax_infer.contracts.autoscale import AutoscalePolicy, AutoscaleSwitch, LoadReport
from relax_infer.contracts.run import RunPlan
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.machines import RunState, ScaleState
from tests.workflows.scaled_role import ScaledRole, Working, scaled_role
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_scaling_faults import APART
from tests.workflows.test_training_run import nothing_was_broken, start

pytestmark = pytest.mark.asyncio(loop_scope="session")


def policy(**fields: Any) -> dict[str, AutoscalePolicy]:
    """Quick to look and to cool down."""
    document = {
        "min_replicas": 2,
        "max_replicas": 4,
        "in_flight_high": 10,
        "in_flight_low": 4,
        "interval": 0.2,
        "looks": 2,
        "cool_down_out": 0,
        "cool_down_in": 0,
        **fields,
    }
    return {"policy": AutoscalePolicy.model_validate(document)}


def load(in_flight: float, **fields: Any) -> LoadReport:
    return LoadReport(in_flight=in_flight, replicas=2, **fields)


async def replicas(role: ScaledRole, number: int) -> bool:
    return len(await role.ready()) == number


async def operations(role: ScaledRole) -> list[ScaleStatus]:
    return await role.handle.query("scaling", result_type=list[ScaleStatus])


async def test_replicas_come_and_go_with_the_load_and_every_reason_is_told(working: Working):
    world = ScriptedWorld()
    world.load = load(45)
    async with scaled_role(working, world, autoscale=policy()) as role:
        await until(lambda: replicas(role, 4))
        await until(lambda: told(role, "the most"))
        (out,) = await operations(role)
        assert (out.by, out.direction, out.state) == ("policy", "out", ScaleState.ACTIVE)
        assert out.reason == "45 requests in flight on 2 replicas"
        world.load = load(1)
        await until(lambda: replicas(role, 2))
        await until(lambda: told(role, "the least"))
        status = await role.autoscaling()
        assert [(note.target, note.outcome) for note in status.decisions] == [
            (4, "ACTIVE"),
            (3, "COMPLETED"),
            (2, "COMPLETED"),
        ]
        assert status.decisions[1].reason == "1 requests in flight on 4 replicas"
        await role.holds_only(0, 1)
        summaries = [
            event.user_metadata.summary.data.decode()
            async for event in role.handle.fetch_history_events()
            if event.HasField("activity_task_scheduled_event_attributes")
        ]
        assert any("45 requests in flight on 2 replicas; look 1 of 2" in s for s in summaries)
    assert world.violations == []


async def told(role: ScaledRole, words: str) -> bool:
    last = (await role.autoscaling()).last
    return last is not None and words in last.reason


async def test_a_steady_load_between_the_bounds_changes_nothing(working: Working):
    world = ScriptedWorld()
    world.load = load(15)
    async with scaled_role(working, world, autoscale=policy()) as role:
        await until(lambda: world.calls["look_at_load"] >= 6)
        assert await operations(role) == []
        await role.holds_only(0, 1)


async def test_a_persons_operation_goes_first_and_stays_for_a_cool_down(working: Working):
    """The policy's own is called off while it is created, and what is asked for is done."""
    world = ScriptedWorld()
    world.load = load(45)
    world.faults["bind_added_replica"] = ["hold", "hold", "hold"]
    async with scaled_role(working, world, autoscale=policy(cool_down_out=3600)) as role:
        await world.held.wait()
        planned = await role.refused(num_replicas=3, dry_run=True)
        assert "CONFLICT" in planned, "what does nothing moves nobody out of the way"
        asked = asyncio.create_task(role.scale("mine", num_replicas=3))
        await until(lambda: given_way(role))
        assert "CONFLICT: operation mine" in await role.refused(num_replicas=4)
        world.go_on.set()
        assert (await asked).state is ScaleState.ACTIVE
        await until(lambda: told(role, "cools down"))
        assert len(await role.ready()) == 3
        decisions = (await role.autoscaling()).decisions
        assert [note.outcome for note in decisions] == ["CANCELLED: the operation was cancelled"]
        assert (await role.autoscaling()).memory.failures == 0


async def given_way(role: ScaledRole) -> bool:
    states = {each.operation_id: each.state for each in await operations(role)}
    return "mine" in states and ScaleState.CANCELLED in states.values()


async def test_what_is_launched_already_is_taken_back_for_a_person(working: Working):
    world = ScriptedWorld()
    world.load = load(45)
    world.faults["launch_engines"] = ["hold"]
    async with scaled_role(working, world, autoscale=policy(cool_down_out=3600)) as role:
        await world.held.wait()
        asked = asyncio.create_task(role.scale("mine", num_replicas=2, direction="out"))
        await until(lambda: known(role, "mine"))
        world.go_on.set()
        assert (await asked).state is ScaleState.NOOP
        (mine, own) = sorted(await operations(role), key=lambda each: each.by)
        assert mine.operation_id == "mine"
        assert own.state is ScaleState.FAILED
        assert "of a person takes over" in str(own.replicas)
        await role.holds_only(0, 1)


async def known(role: ScaledRole, operation_id: str) -> bool:
    return operation_id in {each.operation_id for each in await operations(role)}


async def test_a_failed_operation_is_told_and_not_tried_again_at_once(working: Working):
    world = ScriptedWorld()
    world.load = load(45)
    world.faults["bind_added_replica"] = ["late", "late"]
    async with scaled_role(working, world, autoscale=policy()) as role:
        await until(lambda: told(role, "the last operation failed; waits"))
        looks = world.calls["look_at_load"]
        await until(lambda: world.calls["look_at_load"] > looks + 3)
        (note,) = (await role.autoscaling()).decisions
        assert note.outcome == "FAILED: Ray could not place it in time"
        assert len(await operations(role)) == 1
        await role.holds_only(0, 1)


async def test_it_is_switched_off_and_on_by_name(working: Working):
    world = ScriptedWorld()
    world.load = load(15)
    async with scaled_role(working, world, autoscale=policy()) as role:
        off = AutoscaleSwitch(on=False, who="ada", why="a measurement")
        await role.handle.execute_update("autoscale", off)
        assert (await role.autoscaling()).off == "ada: a measurement"
        world.load = load(45)
        looks = world.calls["look_at_load"]
        await role.bring_up(version=1)
        assert world.calls["look_at_load"] <= looks + 1
        assert await operations(role) == []
        other = AutoscaleSwitch(on=False, who="ada", why="x", model="other")
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await role.handle.execute_update("autoscale", other)
        assert "name one of policy" in str(refused.value.cause)
        on = AutoscaleSwitch(on=True, who="ada", why="it is over")
        await role.handle.execute_update("autoscale", on)
        await until(lambda: replicas(role, 4))


async def test_a_look_that_fails_is_no_decision(working: Working, monkeypatch: Any):
    monkeypatch.setattr("workflows._autoscale.AFTER_A_FAILED_LOOK", 0.1)
    world = ScriptedWorld()
    world.load = load(45)
    world.faults["look_at_load"] = ["refuse"]
    async with scaled_role(working, world, autoscale=policy()) as role:
        await until(lambda: replicas(role, 4))
        assert len((await role.autoscaling()).decisions) == 1


async def test_without_a_policy_nobody_looks_and_nothing_can_be_switched(working: Working):
    world = ScriptedWorld()
    world.load = load(45)
    async with scaled_role(working, world) as role:
        switch = AutoscaleSwitch(on=True, who="ada", why="x")
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await role.handle.execute_update("autoscale", switch)
        assert "has no autoscale section" in str(refused.value.cause)
        assert world.calls["look_at_load"] == 0


@pytest.mark.wide
async def test_a_worker_that_remembers_nothing_decides_the_same(working: Working):
    world = ScriptedWorld()
    world.load = load(45)
    async with scaled_role(
        working, world, cached_workflows=0, autoscale=policy(interval=0.5)
    ) as role:
        await until(lambda: replicas(role, 4))
        world.load = load(1)
        await until(lambda: replicas(role, 2))
        await role.holds_only(0, 1)
        await role.stop()
    assert sorted(k for _, k in world.engines.launches) == [0, 1, 2, 3]
    assert world.pools.there == {}


async def test_a_run_carries_its_policies_to_its_roles(working: Working):
    """From the plan; the role goes down with what the policy has added."""
    world = ScriptedWorld(apart=APART, autoscale={"rollout": policy()})
    world.load = load(45)
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        run = await start(client, steps=1)
        await world.held.wait()
        rollout = client.get_workflow_handle(f"{run.id}.rollout")

        async def scaled() -> bool:
            every = await rollout.query("scaling", result_type=list[ScaleStatus])
            return [each.state for each in every] == [ScaleState.ACTIVE]

        await until(scaled)
        world.go_on.set()
        assert (await run.result()).state is RunState.DONE
    assert world.pools.there == {}
    nothing_was_broken(world)


async def test_a_request_of_a_policy_is_the_same_request():
    mine = ScaleRequest(operation_id="a", num_replicas=3)
    ours = ScaleRequest(operation_id="b", num_replicas=3, by="policy", reason="busy", wait=True)
    assert mine.fingerprint == ours.fingerprint
    assert '"by"' not in mine.fingerprint
    assert RunPlan.model_fields["autoscale"].get_default(call_default_factory=True) == {}
