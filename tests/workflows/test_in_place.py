"""New weights into policy engines that are up and keep their memory."""

import pytest

from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import LeaseState, ReplicaState, RunState
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_schedules import DECOUPLED, is_in, loads
from tests.workflows.test_training_run import Working, lease, nothing_was_broken, start

pytestmark = pytest.mark.asyncio(loop_scope="session")


def decoupled(**changes: object) -> ScriptedWorld:
    world = ScriptedWorld(apart=DECOUPLED, updates_in_place=True, **changes)
    world.engines.routes_checked = True
    return world


def versions_in_registry(world: ScriptedWorld) -> list[int]:
    """Of the policy, each time that it was published READY."""
    return [
        int(model["weight_version"])
        for push in world.pushes
        if push.role == "rollout"
        for model in push.document["models"].values()
        if model["state"] == "READY"
    ]


async def test_engines_of_their_own_keep_their_memory_from_version_to_version(working: Working):
    world = decoupled()
    async with working(world) as client:
        handle = await start(client, steps=3)
        done = await handle.result()
        seen = await lease(client, handle)
    assert (done.state, done.weight_version) == (RunState.DONE, 3)
    assert world.calls["load_engine_weights"] == 3
    assert world.calls["onload_engines"] == 3, "each inference role once"
    grants = [t for t in seen.transitions if t.role == "rollout" and t.event == "GRANTED"]
    assert len(grants) == 1
    assert world.generated == {1: 0, 2: 1, 3: 2}
    published = versions_in_registry(world)
    assert published == sorted(published)
    assert set(published) == {0, 1, 2, 3}
    nothing_was_broken(world)


async def test_nobody_is_routed_to_an_engine_while_its_weights_change(working: Working):
    world = decoupled()
    world.faults["load_engine_weights"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        last = [push for push in world.pushes if push.role == "rollout"][-1]
        assert last.router_workers == ()
        states = {r["state"] for m in last.document["models"].values() for r in m["engines"]}
        assert states == {"ONLOADING"}
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def test_a_policy_that_is_lost_while_its_weights_change_is_waited_for(working: Working):
    world = decoupled(reconcile_timeout=60.0)
    world.faults["load_engine_weights"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        lost = {"role": "rollout", "why": "an engine is lost"}
        await client.get_workflow_handle(f"{handle.id}.lease").signal("holder_lost", lost)

        async def blocked() -> bool:
            return (await lease(client, handle)).roles["rollout"].state is LeaseState.BLOCKED

        await until(blocked)
        world.faults["probe_engines"] = ["hang"]
        world.go_on.set()
        await world.stuck.wait()
        world.freed.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    assert world.calls["load_engine_weights"] == 1
    nothing_was_broken(world)


@pytest.mark.wide
async def test_steps_that_overlap_update_in_place_too(working: Working):
    world = decoupled(max_staleness=2)
    async with working(world) as client:
        done = await (await start(client, steps=5)).result()
    assert (done.state, done.weight_version) == (RunState.DONE, 5)
    assert world.calls["load_engine_weights"] == 5
    versions = list(world.generated.values())
    assert versions == sorted(versions)
    nothing_was_broken(world)


async def test_an_engine_that_dies_in_an_update_is_rebuilt_with_the_new_weights(working: Working):
    world = decoupled()
    world.engines.routes_checked = False
    world.faults["load_engine_weights"] = ["die"]
    async with working(world) as client:
        done = await (await start(client, steps=2)).result()
    assert (done.state, done.weight_version) == (RunState.DONE, 2)
    assert world.engines.launches.count(("rollout", 0)) == 2
    assert world.generated == {1: 0, 2: 1}
    nothing_was_broken(world)


@pytest.mark.parametrize("fault", ["lose_reply", "refuse"])
async def test_an_update_of_which_nobody_knows_is_made_good(working: Working, fault: str):
    """Asked again, or, where that cannot help, by letting go and loading."""
    world = decoupled()
    world.faults["load_engine_weights"] = [fault]
    async with working(world) as client:
        handle = await start(client, steps=2)
        done = await handle.result()
        seen = await lease(client, handle)
    assert (done.state, done.weight_version) == (RunState.DONE, 2)
    assert world.generated == {1: 0, 2: 1}
    grants = [t for t in seen.transitions if t.role == "rollout" and t.event == "GRANTED"]
    assert len(grants) == (1 if fault == "lose_reply" else 2)
    nothing_was_broken(world)


async def test_an_engine_lost_without_proof_in_an_update_waits_for_a_person(working: Working):
    world = decoupled()
    world.engines.routes_checked = False
    world.faults["load_engine_weights"] = ["die_hidden"]
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: is_in(handle, RunState.BLOCKED))
        assert {e.state for e in world.engines.of("rollout")} == {ReplicaState.FAILED}
        world.engines.end_all()
        word = ResolveRun(who="ada", why="looked at the node", confirm_released=True)
        await handle.execute_update("resolve", word)
        done = await handle.result()
    assert (done.state, done.weight_version) == (RunState.DONE, 2)
    assert loads(world, "rollout") > 1
    nothing_was_broken(world)
