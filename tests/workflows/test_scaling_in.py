"""Fewer replicas: the order of one that goes, and what is finished later (contract 7.11, F4)."""

import pytest

from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.scale import ScaleFailure, ScaleStatus
from relax_infer.machines import ReplicaState, ScaleState
from tests.workflows.scaled_role import ScaledRole, Working, scaled_role
from tests.workflows.scripted_world import ScriptedWorld, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


def outcomes(status: ScaleStatus) -> dict[int | None, str]:
    return {row.replica: row.outcome for row in status.replicas}


async def test_callers_first_then_requests_then_processes_then_gpus(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["drain_engine"] = ["hold"]
        await role.begin("one", num_replicas=2)
        await world.held.wait()
        assert role.routed() == 2, "the router does not name it"
        assert role.shown()["policy/replica-2"] == "DRAINING"
        assert role.engine(2).state is ReplicaState.READY, "it answers what it has admitted"
        assert world.engines.stops == []
        assert role.pools() == [2]
        world.go_on.set()
        done = await role.scale("one", num_replicas=2)
        assert done.state is ScaleState.COMPLETED
        await role.holds_only(0, 1)
    assert world.engines.stops.count(("rollout", 2)) == 1


async def test_the_newest_goes_first_and_one_s_own_choice_by_its_address(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=5)
        assert outcomes(await role.scale(num_replicas=4)) == {4: "removed"}
        url = await role.url(2)
        chosen = await role.scale(engine_urls=(f"{url}/", "http://nobody"))
        assert chosen.state is ScaleState.PARTIAL
        assert [(r.replica, r.outcome, r.failure) for r in chosen.replicas] == [
            (2, "removed", None),
            (None, "failed", ScaleFailure.INVALID_ENGINE_ADDRESS),
        ]
        await role.holds_only(0, 1, 3)
        began = await role.scale(engine_urls=(await role.url(0),))
        assert began.state is ScaleState.REJECTED
        await role.holds_only(0, 1, 3)


async def test_a_router_that_keeps_a_replica_keeps_it_alive(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["push_registry"] = ["refuse"]
        done = await role.scale(num_replicas=2)
        assert done.state is ScaleState.FAILED
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("unchanged", ScaleFailure.ROUTER_REMOVAL_FAILED)
        await role.holds_only(0, 1, 2)
        assert world.engines.stops == []


async def test_a_replica_that_does_not_drain_is_not_ended_unless_one_insists(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["drain_engine"] = ["busy"]
        done = await role.scale(num_replicas=2, drain_timeout=7)
        assert done.state is ScaleState.FAILED
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("left", ScaleFailure.DRAIN_TIMEOUT)
        assert row.why == "2 requests were not answered in 7 s"
        assert role.engine(2).state is ReplicaState.READY
        assert role.routed() == 2
        drains = world.calls["drain_engine"]
        forced = await role.scale(num_replicas=2, force=True)
        assert outcomes(forced) == {2: "removed"}
        assert world.calls["drain_engine"] == drains
        await role.holds_only(0, 1)


async def test_force_does_not_pass_over_the_proof(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        role.engine(2).hides = True
        done = await role.scale(num_replicas=2, force=True)
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("left", ScaleFailure.STOP_UNCONFIRMED)
        assert role.pools() == [2]


async def half_cleaned(role: ScaledRole) -> str:
    """A third replica whose follower was left: its address, as it was."""
    await role.scale(num_replicas=3)
    url = await role.url(2)
    role.engine(2).hides = True
    assert outcomes(await role.scale(num_replicas=2)) == {2: "left"}
    role.engine(2).hides = False
    return url


@pytest.mark.parametrize("by", ["count", "address"])
async def test_a_half_cleaned_replica_is_finished_by_count_or_by_address(working: Working, by: str):
    """pains 23, finding F4. Its placement group is removed once, at the end."""
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        url = await half_cleaned(role)
        asked = {"num_replicas": 2} if by == "count" else {"engine_urls": (url,)}
        assert outcomes(await role.scale(**asked)) == {2: "removed"}  # type: ignore[arg-type]
        await role.holds_only(0, 1)
    assert world.pools.removed == {"added-rollout-policy-2": 1}


async def test_it_is_found_by_the_address_it_had_after_a_recovery(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        before = await role.url(2)
        role.engine(2).die()
        await until(lambda: rebuilt(role, 2))
        after = await role.url(2)
        assert after != before
        role.engine(2).hides = True
        old = await role.scale(engine_urls=(before,))
        assert old.state is ScaleState.REJECTED, "nobody has that address any more"
        assert outcomes(await role.scale(engine_urls=(after,))) == {2: "left"}
        role.engine(2).hides = False
        assert outcomes(await role.scale(engine_urls=(after,))) == {2: "removed"}
        await role.holds_only(0, 1)


async def rebuilt(role: ScaledRole, replica: int) -> bool:
    seen = await role.group()
    generation = dict(zip((r.replica for r in seen.replicas), seen.generations, strict=True))
    return generation[replica] == 2 and replica in await role.ready()


async def test_what_was_stopped_is_not_stopped_again_for_the_sake_of_its_gpus(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["release_added_replica"] = ["refuse"]
        done = await role.scale(num_replicas=2)
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("left", ScaleFailure.PLACEMENT_KEPT)
        assert outcomes(await role.scale(num_replicas=2)) == {2: "removed"}
        await role.holds_only(0, 1)
    assert world.engines.stops.count(("rollout", 2)) == 1


async def test_replicas_go_side_by_side_and_one_does_not_hold_the_others(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=5)
        role.engine(3).hides = True
        done = await role.scale(num_replicas=2)
        assert done.state is ScaleState.PARTIAL
        assert outcomes(done) == {4: "removed", 3: "left", 2: "removed"}
        assert done.after == 2
        role.engine(3).hides = False
        assert outcomes(await role.scale(num_replicas=2)) == {3: "removed"}
        await role.holds_only(0, 1)


async def test_weights_do_not_change_while_a_replica_drains(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["drain_engine"] = ["hold"]
        await role.begin("one", num_replicas=2)
        await world.held.wait()
        loads = world.log.count(("rollout", "onload"))
        sync = await role.client.get_workflow_handle(f"{role.run.run}.lease").start_update(
            "acquire",
            role.weights_command("sync", 1),
            wait_for_stage=role.accepted,
        )
        await until(lambda: role.shown()["policy/replica-0"] == "DRAINING")
        assert world.log.count(("rollout", "onload")) == loads
        assert role.engine(0).weights == 0
        world.go_on.set()
        await sync.result()
        assert role.engine(0).weights == 1
        done = await role.scale("one", num_replicas=2)
        assert done.state is ScaleState.COMPLETED
        await role.holds_only(0, 1)


async def test_scale_in_waits_for_weights_that_change_and_then_lets_be(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        world.faults["offload_engines"] = ["hold"]
        sync = await role.client.get_workflow_handle(f"{role.run.run}.lease").start_update(
            "acquire", role.weights_command("sync", 1), wait_for_stage=role.accepted
        )
        await world.held.wait()
        done = await role.scale(num_replicas=2, drain_timeout=0.5)
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("unchanged", ScaleFailure.WEIGHT_UPDATE_RUNNING)
        world.go_on.set()
        await sync.result()
        await role.holds_only(0, 1, 2)
        assert role.engine(2).weights == 1


async def test_no_recovery_brings_a_removed_replica_back(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        role.engine(2).launches_fail = 3
        role.engine(2).die()
        await until(lambda: given_up(role, 2))
        assert outcomes(await role.scale(num_replicas=2)) == {2: "removed"}
        launched = world.engines.launches.count(("rollout", 2))
        await role.handle.execute_update("recover", result_type=RoleResult)
        role.engine(0).die()
        await until(lambda: rebuilt(role, 0))
        await role.bring_up(version=1)
        assert world.engines.launches.count(("rollout", 2)) == launched
        await role.holds_only(0, 1)


async def given_up(role: ScaledRole, replica: int) -> bool:
    seen = await role.group()
    return seen.state == "READY" and any(
        r.replica == replica and r.state is ReplicaState.DEAD for r in seen.replicas
    )


async def test_an_added_replica_that_dies_is_rebuilt_like_any_other(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        role.engine(2).die()
        await until(lambda: rebuilt(role, 2))
        await role.holds_only(0, 1, 2)


async def test_a_replica_whose_end_waits_for_proof_is_left_to_its_recovery(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.scale(num_replicas=3)
        role.engine(2).hides = True
        role.engine(2).die()
        await until(lambda: in_state(role, "BLOCKED"))
        done = await role.scale(num_replicas=2)
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("unchanged", ScaleFailure.RECOVERY_RUNNING)
        role.engine(2).hides = False
        await until(lambda: rebuilt(role, 2))
        assert outcomes(await role.scale(num_replicas=2)) == {2: "removed"}
        await role.holds_only(0, 1)


async def in_state(role: ScaledRole, state: str) -> bool:
    return (await role.group()).state == state


async def test_a_role_that_goes_down_ends_what_was_left_first(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await half_cleaned(role)
        await role.scale("more", num_replicas=3)
        await role.stop()
    assert world.pools.there == {}
    assert not any(e.holds for e in world.engines.engines.values())
    assert set(world.pools.removed.values()) == {1}
    assert world.violations == []


@pytest.mark.parametrize("role_name", ["genrm", "teacher"])
async def test_roles_without_a_policy_are_scaled_alike(working: Working, role_name: str):
    world = ScriptedWorld()
    async with scaled_role(working, world, role_name) as role:
        out = await role.scale(num_replicas=3)
        assert out.state is ScaleState.ACTIVE
        assert world.calls["load_engine_weights"] == 0, "their weights never change"
        await role.holds_only(0, 1, 2)
        assert (await role.scale(num_replicas=2)).state is ScaleState.COMPLETED
        await role.holds_only(0, 1)
