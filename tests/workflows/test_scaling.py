"""More replicas: what an operation does, refuses and leaves behind (contract 7.10)."""

from typing import Any

import pytest
from temporalio.client import WorkflowUpdateStage

from relax_infer.contracts.scale import ScaleFailure, ScaleRequest
from relax_infer.discovery import Role
from relax_infer.gateway.operator import ScaleRefused
from relax_infer.machines import ScaleState
from tests.workflows.scaled_role import Working, scaled_role
from tests.workflows.scripted_world import ScriptedWorld
from workers.gateway import RoleWorkflows

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_out_and_in_again_with_everything_in_its_order(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        await role.holds_only(0, 1)
        out = await role.scale(num_replicas=4)
        assert (out.state, out.direction) == (ScaleState.ACTIVE, "out")
        assert (out.before, out.after) == (2, 4)
        assert [(r.replica, r.outcome) for r in out.replicas] == [(2, "added"), (3, "added")]
        await role.holds_only(0, 1, 2, 3)
        assert (await role.group()).generations == (1, 1, 1, 1)
        inward = await role.scale(num_replicas=3)
        assert inward.state is ScaleState.COMPLETED
        assert [(r.replica, r.outcome) for r in inward.replicas] == [(3, "removed")]
        await role.holds_only(0, 1, 2)
        await role.stop()
    assert world.pools.there == {}
    assert not any(e.holds for e in world.engines.engines.values())
    assert world.violations == []


async def test_a_replica_answers_nobody_before_its_weights_are_the_group_s(working: Working):
    """The group moves on while the replica is launched; it is adopted with the new weights."""
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["bind_added_replica"] = ["hold"]
        await role.begin("one", num_replicas=3)
        await world.held.wait()
        await role.bring_up(version=1)
        world.go_on.set()
        done = await role.scale("one", num_replicas=3)
        assert done.state is ScaleState.ACTIVE
        assert role.engine(2).weights == 1
        await role.holds_only(0, 1, 2)
        granted = await role.bring_up(version=2)
        assert granted.holders == ("policy/replica-0", "policy/replica-1", "policy/replica-2")
        assert role.engine(2).weights == 2
        await role.holds_only(0, 1, 2)


async def test_another_operation_meets_who_is_at_work_and_the_same_joins(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["bind_added_replica"] = ["hold"]
        first = await role.begin("one", num_replicas=3)
        assert not first.ended
        await world.held.wait()
        told = await role.refused("two", num_replicas=4)
        assert "CONFLICT: operation one is at work on policy (CREATING)" in told
        assert "asked for something else" in await role.refused("one", num_replicas=4)
        again = await role.begin("one", num_replicas=3)
        assert again.operation_id == "one"
        world.go_on.set()
        done = await role.scale("one", num_replicas=3)
        assert done.state is ScaleState.ACTIVE
        assert await role.scale("one", num_replicas=3) == done
        assert world.calls["launch_engines"] == 1
        await role.holds_only(0, 1, 2)


@pytest.mark.parametrize(
    ("asked", "state", "told"),
    [
        ({"num_replicas": 2, "direction": "out"}, ScaleState.NOOP, "there are 2"),
        ({"num_replicas": 1, "direction": "out"}, ScaleState.NOOP, "there are 2"),
        ({"num_replicas": 2, "direction": "in"}, ScaleState.NOOP, "there are 2"),
        ({"num_replicas": 9, "direction": "in"}, ScaleState.NOOP, "there are 2"),
        ({"num_replicas": 1}, ScaleState.REJECTED, "below the 2 replicas"),
        ({}, ScaleState.REJECTED, "give either"),
        ({"num_replicas": 3, "engine_urls": ("http://x",)}, ScaleState.REJECTED, "give either"),
        ({"engine_urls": ("http://x",)}, ScaleState.REJECTED, "no added replica has the address"),
        ({"engine_urls": ("x",), "direction": "out"}, ScaleState.REJECTED, "write http://"),
        (
            {"engine_urls": ("http://127.0.0.1:10001/",), "direction": "in"},
            ScaleState.REJECTED,
            "no added replica|the group began with",
        ),
    ],
)
async def test_what_is_not_to_be_done_does_nothing(
    working: Working, asked: dict[str, Any], state: ScaleState, told: str
):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        done = await role.scale(**asked)
        assert done.state is state
        assert any(part in (done.why or "") for part in told.split("|"))
        assert done.ended
        await role.holds_only(0, 1)
    assert world.pools.made == {}


async def test_a_role_that_takes_turns_is_not_scaled(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world, shares_with=("trainer", "genrm")) as role:
        assert "shares its GPUs with trainer, genrm" in await role.refused(num_replicas=3)


async def test_a_model_that_the_role_does_not_have_is_refused(working: Working):
    async with scaled_role(working, ScriptedWorld()) as role:
        told = await role.refused(num_replicas=3, model="other")
        assert "rollout has no model other: name one of policy" in told


async def test_a_dry_run_says_what_would_be_done_and_does_nothing(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        done = await role.scale(num_replicas=4, dry_run=True)
        assert (done.state, done.ended) == (ScaleState.PENDING, True)
        assert [r.outcome for r in done.replicas] == ["planned", "planned"]
        await role.scale(num_replicas=3)
        url = await role.url(2)
        inward = await role.scale(num_replicas=2, dry_run=True)
        assert [(r.replica, r.url) for r in inward.replicas] == [(2, url)]
        await role.holds_only(0, 1, 2)


FAILS_OUT = [
    ("bind_added_replica", ["refuse"], ScaleFailure.PROVISION_FAILED),
    ("bind_added_replica", ["late"], ScaleFailure.PROVISION_TIMEOUT),
    ("launch_engines", ["die"], ScaleFailure.HEALTH_CHECK_FAILED),
    ("launch_engines", ["exit"], ScaleFailure.ENGINE_INIT_FAILED),
    ("load_engine_weights", ["die"], ScaleFailure.WEIGHT_SYNC_FAILED),
    ("load_engine_weights", ["refuse"], ScaleFailure.WEIGHT_SYNC_FAILED),
    ("onload_engines", ["die"], ScaleFailure.HEALTH_CHECK_FAILED),
    ("onload_engines", ["other_weights"], ScaleFailure.WEIGHT_SYNC_FAILED),
    ("push_registry", ["refuse"], ScaleFailure.ROUTER_REGISTRATION_FAILED),
]


@pytest.mark.parametrize(("name", "faults", "failure"), FAILS_OUT)
async def test_a_replica_that_fails_is_ended_with_proof_and_told(
    working: Working, name: str, faults: list[str], failure: ScaleFailure
):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults[name] = faults
        done = await role.scale(num_replicas=3)
        assert done.state is ScaleState.FAILED
        (row,) = done.replicas
        assert (row.outcome, row.failure) == ("failed", failure)
        assert done.after == 2
        await role.holds_only(0, 1)
        again = await role.scale(num_replicas=3)
        assert [r.replica for r in again.replicas] == [3], "a number is given once"
        await role.holds_only(0, 1, 3)


async def test_one_that_cannot_be_made_does_not_take_the_others_along(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["bind_added_replica"] = ["late"]
        done = await role.scale(num_replicas=4)
        assert done.state is ScaleState.PARTIAL
        assert sorted(r.outcome for r in done.replicas) == ["added", "failed"]
        assert (done.before, done.after) == (2, 3)
        (added,) = [r.replica for r in done.replicas if r.outcome == "added"]
        assert added is not None
        await role.holds_only(0, 1, added)


async def test_what_cannot_be_proved_gone_is_fenced_and_listed_and_finished_later(
    working: Working,
):
    """Finding F4: selected again by count."""
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["load_engine_weights"] = ["die_hidden"]
        done = await role.scale(num_replicas=3)
        assert done.state is ScaleState.FAILED
        (row,) = done.replicas
        assert (row.replica, row.outcome) == (2, "left")
        assert "hides its environment" in (row.why or "")
        assert role.pools() == [2], "its GPUs stay fenced"
        assert (await role.group()).state == "READY", "the others go on"
        await role.bring_up(version=1)  # and are not held up
        still = await role.scale(num_replicas=2)
        assert still.state is ScaleState.FAILED
        assert [(r.replica, r.outcome) for r in still.replicas] == [(2, "left")]
        role.engine(2).hides = False
        done = await role.scale(num_replicas=2)
        assert done.state is ScaleState.COMPLETED
        await role.holds_only(0, 1)
    assert world.pools.removed == {"added-rollout-policy-2": 1}


async def test_a_cancelled_operation_leaves_nothing(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["bind_added_replica"] = ["hold"]
        await role.begin("one", num_replicas=4)
        await world.held.wait()
        done = await role.cancel("one")
        assert done.state is ScaleState.CANCELLED
        await role.operation("one").result()
        await role.holds_only(0, 1)
        assert world.calls["launch_engines"] == 0


async def test_an_operation_that_has_launched_an_engine_is_not_cancelled(working: Working):
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["launch_engines"] = ["hold"]
        await role.begin("one", num_replicas=3)
        await world.held.wait()
        with pytest.raises(Exception, match="Workflow update failed") as refused:
            await role.cancel("one")
        assert "it can be cancelled until it is CREATING" in str(refused.value.__cause__)
        world.go_on.set()
        assert (await role.scale("one", num_replicas=3)).state is ScaleState.ACTIVE


async def test_a_role_that_goes_down_ends_what_is_being_made(working: Working):
    """7.10: new executions end with the reason, and nothing stays behind."""
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        world.faults["launch_engines"] = ["hold"]
        await role.begin("one", num_replicas=4)
        await world.held.wait()
        await role.lease("release", role="rollout")
        accepted = WorkflowUpdateStage.ACCEPTED
        await role.handle.start_update("shutdown", wait_for_stage=accepted)
        world.go_on.set()
        done = await role.operation("one").result()
        await role.handle.result()
        assert done.state is ScaleState.FAILED
        assert all("Rollout shutdown has started" in (r.why or "") for r in done.replicas)
    assert world.pools.there == {}
    assert not any(e.holds for e in world.engines.engines.values())


async def test_a_gateway_asks_the_role_and_tells_a_conflict_from_a_refusal(
    working: Working, monkeypatch: pytest.MonkeyPatch
):
    """What the operator's routes stand on, with a client that knows nothing of our types."""
    world = ScriptedWorld()
    async with scaled_role(working, world) as role:
        monkeypatch.setenv("TEMPORAL_ADDRESS", role.client.service_client.config.target_host)
        gateway = RoleWorkflows(role.run.run)
        assert await gateway.scaling(Role.ROLLOUT, "one") is None
        world.faults["bind_added_replica"] = ["hold"]
        begun = await gateway.scale(
            Role.ROLLOUT, ScaleRequest(operation_id="one", direction="out", num_replicas=3)
        )
        assert not begun.ended
        await world.held.wait()
        with pytest.raises(ScaleRefused) as conflict:
            await gateway.scale(Role.ROLLOUT, ScaleRequest(operation_id="two", num_replicas=4))
        assert conflict.value.conflict
        with pytest.raises(ScaleRefused, match="has no model other") as refused:
            await gateway.scale(Role.ROLLOUT, ScaleRequest(operation_id="two", model="other"))
        assert not refused.value.conflict
        world.go_on.set()
        assert (await role.scale("one", direction="out", num_replicas=3)).ended
        known = await gateway.scaling(Role.ROLLOUT, "one")
        assert known is not None
        assert known.state is ScaleState.ACTIVE
