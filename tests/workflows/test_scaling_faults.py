"""Scale operations whose workers, answers and replicas are lost: finished, never twice, no leak."""

import random

import pytest

from relax_infer.contracts.run import ResolveRun
from relax_infer.contracts.scale import ScaleRequest
from relax_infer.machines import ReplicaState, RunState, ScaleState
from tests.marks import wide
from tests.workflows.scaled_role import ScaledRole, Working, scaled_role
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import blocked, nothing_was_broken, start, status

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROLES = ("rollout", "genrm", "teacher", "trainer")
APART = tuple((a, b) for k, a in enumerate(ROLES) for b in ROLES[k + 1 :])
"""Nobody shares a GPU."""

LOST_ANSWERS = [
    ("bind_added_replica", "lose_reply"),
    ("launch_engines", "lose_reply"),
    ("stop_engines", "lose_reply"),
    *wide(
        ("bind_added_replica", "flake"),
        ("probe_engines", "flake"),
        ("load_engine_weights", "lose_reply"),
        ("onload_engines", "lose_reply"),
        ("push_registry", "flake"),
        ("drain_engine", "flake"),
        ("release_added_replica", "lose_reply"),
    ),
]


@pytest.mark.parametrize(("name", "fault"), LOST_ANSWERS)
async def test_an_answer_that_is_lost_is_asked_for_again(working: Working, name: str, fault: str):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults[name] = [fault]
        assert (await role.scale(num_replicas=3)).state is ScaleState.ACTIVE
        await role.holds_only(0, 1, 2)
        assert (await role.scale(num_replicas=2)).state is ScaleState.COMPLETED
        await role.holds_only(0, 1)
        assert world.faults[name] == []
    assert world.pools.made == world.pools.removed == {"added-rollout-policy-2": 1}
    assert [k for _, k in world.engines.launches].count(2) <= 2


@pytest.mark.wide
async def test_a_worker_that_is_killed_after_every_decision_goes_on_where_it_was(
    working: Working,
):
    world = ScriptedWorld()
    async with scaled_role(working, world, cached_workflows=0) as role:
        assert (await role.scale(num_replicas=4)).state is ScaleState.ACTIVE
        await role.holds_only(0, 1, 2, 3)
        await role.bring_up(version=1)
        assert (await role.scale(num_replicas=2)).state is ScaleState.COMPLETED
        await role.holds_only(0, 1)
        await role.stop()
    assert sorted(k for _, k in world.engines.launches) == [0, 1, 2, 3]
    assert world.pools.there == {}


@pytest.mark.parametrize("name", ["bind_added_replica", "launch_engines", "load_engine_weights"])
async def test_an_operation_that_somebody_ended_is_listed_and_finished_by_another(
    working: Working, name: str
):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults[name] = ["hold"]
        await role.begin("one", num_replicas=3)
        await world.held.wait()
        await role.operation("one").terminate("somebody pressed the wrong button")
        ended = await role.scale("one", num_replicas=3)
        assert ended.ended
        assert "terminated" in (ended.why or "").lower()
        world.go_on.set()
        left = await role.outsiders()
        assert [record.stage for record in left.values()] == ["left"]
        assert (await role.scale(num_replicas=2)).state is ScaleState.COMPLETED
        await until(lambda: role.pools() == [])
        await role.holds_only(0, 1)


async def test_a_run_with_added_replicas_ends_with_nothing_left(working: Working):
    """The step that generates goes on; the next weights reach every replica; the run ends them."""
    world = ScriptedWorld(apart=APART)
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        run = await start(client, steps=2)
        await world.held.wait()
        request = ScaleRequest(operation_id="more", num_replicas=4, wait=True)
        rollout = client.get_workflow_handle(f"{run.id}.rollout")
        await rollout.execute_update("scale", request)
        assert world.engines.engines["rollout", 3].state is ReplicaState.READY
        world.go_on.set()
        done = await run.result()
    assert done.state is RunState.DONE
    assert world.engines.engines["rollout", 3].weights == 2
    assert world.pools.there == {}
    assert world.pools.removed == {"added-rollout-policy-2": 1, "added-rollout-policy-3": 1}
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_person_s_word_ends_what_was_left_on_a_node_that_burned(working: Working):
    """It holds nobody up until the run ends; there nothing but a word is left."""
    world = ScriptedWorld(apart=APART)
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        run = await start(client, steps=1)
        await world.held.wait()
        rollout = client.get_workflow_handle(f"{run.id}.rollout")
        for number, replicas in enumerate((3, 2)):
            asked = {"operation_id": f"op-{number}", "num_replicas": replicas, "wait": True}
            await rollout.execute_update("scale", ScaleRequest.model_validate(asked))
            lost = world.engines.engines["rollout", 2]
            lost.hides = lost.unreachable = True
        world.go_on.set()
        await until(lambda: blocked(run))
        assert "cannot stop rollout" in (await status(run)).doing
        assert [each.replica for each in world.pools.there.values()] == [2]
        word = ResolveRun(who="ada", why="the node burned", confirm_released=True)
        await run.execute_update("resolve", word)
        done = await run.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    assert world.pools.there == {}
    # The double does not know that the word is true; what the word was given for is all it notes.
    assert world.violations == ["added-rollout-policy-2 is removed under a living engine"]


FAULTS = {
    "bind_added_replica": ("refuse", "late", "lose_reply"),
    "launch_engines": ("die", "exit", "lose_reply"),
    "load_engine_weights": ("die", "die_hidden", "lose_reply"),
    "onload_engines": ("die", "lose_reply"),
    "push_registry": ("refuse", "flake"),
    "drain_engine": ("busy", "flake"),
    "stop_engines": ("lose_reply", "refuse"),
    "release_added_replica": ("refuse", "lose_reply"),
}


@pytest.mark.parametrize("seed", wide(*range(5)))
async def test_ten_operations_with_faults_leak_nothing(working: Working, seed: int):
    """Fifty in all; after each, what is there is counted."""
    chance = random.Random(seed)
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        for number in range(10):
            await disturb(role, chance)
            await role.scale(f"random-{number}", **await anything(role, chance))
            world.faults.clear()
            await everything_is_accounted_for(role)
            if chance.random() < 0.3:
                await role.bring_up(version=role.version + 1)
        for engine in world.engines.of("rollout"):
            engine.hides = False
        await role.scale("last", num_replicas=2, force=True)
        await role.holds_only(0, 1)
        await role.stop()
    assert world.pools.there == {}
    assert world.pools.made == world.pools.removed
    assert not any(e.holds for e in world.engines.engines.values())


async def disturb(role: ScaledRole, chance: random.Random) -> None:
    for name, faults in FAULTS.items():
        if chance.random() < 0.3:
            role.world.faults[name] = [chance.choice(faults)]
    for replica in sorted(await role.outsiders()):
        if role.engine(replica).holds:
            role.engine(replica).hides = chance.random() < 0.3


async def anything(role: ScaledRole, chance: random.Random) -> dict[str, object]:
    added = [k for k in await role.ready() if k >= 2]
    if added and chance.random() < 0.3:
        return {"engine_urls": (await role.url(chance.choice(added)),)}
    return {"num_replicas": chance.randint(1, 5), "force": chance.random() < 0.3}


async def everything_is_accounted_for(role: ScaledRole) -> None:
    """What holds GPUs or a placement group is in the table or listed; nothing else is routed."""

    async def quiet() -> bool:
        return (await role.group()).state == "READY" and role.routed() == len(await role.ready())

    await until(quiet)
    ready, left = set(await role.ready()), set(await role.outsiders())
    holds = {k for (_, k), e in role.world.engines.engines.items() if e.holds}
    assert ready >= {0, 1}
    assert not ready & left
    assert holds - left == ready
    assert set(role.pools()) - left == ready - {0, 1}
    assert role.world.violations == []
