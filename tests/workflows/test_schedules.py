"""Runs whose roles are side by side (split) or have GPUs of their own (decoupled); overlap."""

from itertools import combinations

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError

from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import LeaseState, RunState
from tests.workflows.scripted_world import ScriptedWorld, plan, until
from tests.workflows.test_training_run import (
    Handle,
    Working,
    lease,
    nothing_was_broken,
    start,
    status,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROLES = ("rollout", "genrm", "teacher", "trainer")
DECOUPLED = tuple(combinations(ROLES, 2))
SPLIT = tuple(combinations(ROLES[:3], 2))
"""The inference roles are side by side and take turns with the trainer."""


def loads(world: ScriptedWorld, role: str) -> int:
    return world.log.count((role, "onload"))


async def is_in(handle: Handle, state: RunState) -> bool:
    return (await status(handle)).state is state


async def test_a_role_with_gpus_of_its_own_keeps_them(working: Working):
    world = ScriptedWorld(apart=DECOUPLED)
    async with working(world) as client:
        handle = await start(client, steps=3)
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert done.weight_version == 3
    assert [loads(world, role) for role in ("genrm", "teacher", "trainer")] == [1, 1, 1]
    assert loads(world, "rollout") == 4, "once for each version of the weights"
    assert world.generated == {1: 0, 2: 1, 3: 2}
    assert seen.holders == ()
    nothing_was_broken(world)


@pytest.mark.wide
async def test_roles_side_by_side_let_go_before_the_commit(working: Working):
    world = ScriptedWorld(apart=SPLIT)
    async with working(world) as client:
        done = await (await start(client, steps=1)).result()
    assert done.state is RunState.DONE
    first = world.log.index(("rollout", "generate_groups")) - 1
    assert world.log[first : first + 2] == [("rollout", "onload"), ("rollout", "generate_groups")]
    assert set(world.log[first + 2 : first + 6]) == {
        ("genrm", "onload"),
        ("genrm", "judge_samples"),
        ("teacher", "onload"),
        ("teacher", "teach_samples"),
    }
    assert world.log[first + 6 : first + 12] == [
        ("rollout", "offload"),
        ("genrm", "offload"),
        ("teacher", "offload"),
        ("trainer", "onload"),
        ("trainer", "train 1"),
        ("trainer", "offload"),
    ]
    nothing_was_broken(world)


@pytest.mark.parametrize("apart", [SPLIT, DECOUPLED], ids=["split", "decoupled"])
async def test_scorers_that_share_no_gpu_work_at_once(
    working: Working, apart: tuple[tuple[str, str], ...]
):
    world = ScriptedWorld(apart=apart)
    world.faults["judge_samples"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        await until(lambda: world.calls["teach_samples"] == 1)
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


async def test_a_scorer_that_fails_lets_the_other_end_before_the_step_gives_up(working: Working):
    """What is scored stays, and is not asked for again."""
    world = ScriptedWorld(apart=SPLIT)
    world.faults["judge_samples"] = ["hold"]
    world.faults["teach_samples"] = ["refuse"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await world.held.wait()
        await until(lambda: world.calls["teach_samples"] == 1)
        assert not await is_in(handle, RunState.BLOCKED)
        world.go_on.set()
        await until(lambda: is_in(handle, RunState.BLOCKED))
        await handle.execute_update("resolve", ResolveRun(who="ada", why="the Teacher is back"))
        done = await handle.result()
    assert done.state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.parametrize("staleness", [1, 2])
async def test_generation_runs_ahead_of_training_within_its_bound(working: Working, staleness: int):
    world = ScriptedWorld(apart=DECOUPLED, max_staleness=staleness)
    world.faults["train_step"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=5)
        await world.held.wait()
        await until(lambda: world.calls["generate_groups"] == 1 + staleness)
        assert world.ledger == {}
        world.go_on.set()
        done = await handle.result()
    assert done.state is RunState.DONE
    assert [p.step for p in done.progress] == [0, 1, 2, 3, 4, 5]
    assert list(world.ledger) == [1, 2, 3, 4, 5]
    assert world.generated[1 + staleness] == 0
    assert all(0 <= step - 1 - v <= staleness for step, v in world.generated.items())
    versions = list(world.generated.values())
    assert versions == sorted(versions)
    nothing_was_broken(world)


async def test_a_run_that_is_ahead_pauses_when_its_open_steps_have_ended(working: Working):
    world = ScriptedWorld(apart=DECOUPLED, max_staleness=1)
    world.faults["train_step"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=4)
        await world.held.wait()
        await handle.execute_update("pause")
        world.go_on.set()
        await until(lambda: is_in(handle, RunState.PAUSED))
        paused = await status(handle)
        assert paused.step in (1, 2)
        assert list(world.ledger) == list(range(1, paused.step + 1))
        await handle.execute_update("resume")
        done = await handle.result()
    assert done.step == 4
    nothing_was_broken(world)


async def test_a_step_that_gives_up_holds_back_only_what_follows_it(working: Working):
    """The next step's batch waits, whole, until a person has the first one tried again."""
    world = ScriptedWorld(apart=DECOUPLED, max_staleness=1)
    world.faults["train_step"] = ["hold", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: world.calls["finalise_batch"] == 2)
        world.go_on.set()
        await until(lambda: is_in(handle, RunState.BLOCKED))
        assert world.ledger == {}
        await handle.execute_update("resolve", ResolveRun(who="ada", why="the disk was full"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert list(world.ledger) == [1, 2, 3]
    assert world.calls["generate_groups"] == 4, "step 1 twice, from its shards"
    nothing_was_broken(world)


async def test_a_blocked_run_that_is_ahead_can_be_stopped(working: Working):
    world = ScriptedWorld(apart=DECOUPLED, max_staleness=2)
    world.faults["train_step"] = ["hold", "refuse"]
    async with working(world) as client:
        handle = await start(client, steps=5)
        await until(lambda: world.calls["finalise_batch"] == 3)
        world.go_on.set()
        await until(lambda: is_in(handle, RunState.BLOCKED))
        await handle.execute_update("resolve", ResolveRun(who="ada", why="enough", action="stop"))
        done = await handle.result()
    assert done.state is RunState.DONE
    assert world.ledger == {}
    assert world.violations == []
    assert not any(e.holds for e in world.engines.engines.values())
    assert not world.engines.trainer_holds


async def test_two_roles_in_doubt_are_told_together_and_each_is_freed_by_its_own_proof(
    working: Working,
):
    world = ScriptedWorld(apart=DECOUPLED, reconcile_timeout=0.5)
    for role, asked in (("genrm", "judge_samples"), ("teacher", "teach_samples")):
        world.engines.engines[role, 0].hides = True
        world.faults[asked] = ["kill_engine"]
    async with working(world) as client:
        handle = await start(client, steps=1)

        async def waits_for(*roles: str) -> bool:
            seen = await status(handle)
            named = {role for role in ("genrm", "teacher") if f"{role}: " in seen.doing}
            return seen.state is RunState.BLOCKED and named == set(roles)

        await until(lambda: waits_for("genrm", "teacher"))
        world.engines.engines["teacher", 0].hides = False
        await until(lambda: waits_for("genrm"))
        word = ResolveRun(who="ada", why="looked at its node", confirm_released=True)
        with pytest.raises(WorkflowUpdateFailedError):
            await handle.execute_update("resolve", word)  # it hides still
        assert await waits_for("genrm")
        world.engines.end_all()
        await handle.execute_update("resolve", word)
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    nothing_was_broken(world)


async def lose_the_judge(client: Client, handle: Handle, world: ScriptedWorld) -> None:
    """While the policy generates, and so that no proof can be had."""
    await world.held.wait()
    world.engines.engines["genrm", 0].hides = True
    world.engines.engines["genrm", 0].die()
    await until(lambda: doubted(client, handle, "genrm"))


async def doubted(client: Client, handle: Handle, role: str) -> bool:
    return (await lease(client, handle)).roles[role].state is LeaseState.BLOCKED


async def test_a_step_waits_for_a_role_that_was_lost_before_its_turn(working: Working):
    """Though the role has GPUs of its own and the lease was not asked for them yet."""
    world = ScriptedWorld(apart=DECOUPLED, reconcile_timeout=60.0)
    world.faults["generate_groups"] = ["hold"]
    async with working(world) as client:
        handle = await start(client, steps=1)
        await lose_the_judge(client, handle, world)
        world.go_on.set()
        await until(lambda: world.calls["teach_samples"])
        assert (await status(handle)).state is RunState.RUNNING
        world.engines.engines["genrm", 0].hides = False
        done = await handle.result()
    assert done.state is RunState.DONE
    assert sorted(world.ledger) == [1]
    assert {name: world.calls[name] for name in ("generate_groups", "judge_samples")} == {
        "generate_groups": 1,
        "judge_samples": 1,
    }
    nothing_was_broken(world)


async def test_continue_as_new_waits_for_the_open_steps(working: Working):
    world = ScriptedWorld(apart=DECOUPLED, max_staleness=1)
    async with working(world) as client:
        handle = await start(client, steps=6, steps_per_history=2)
        done = await client.get_workflow_handle(
            handle.id, result_type=type(await status(handle))
        ).result()
    assert done.step == 6
    assert list(world.ledger) == [1, 2, 3, 4, 5, 6]
    nothing_was_broken(world)


async def test_scorers_that_somebody_else_serves_take_no_gpus(working: Working):
    """They are asked in their turn, again after a failure, and the lease knows nothing of them."""
    world = ScriptedWorld(roles=("rollout", "trainer"), groups=plan("run").groups[:1])
    world.faults["teach_samples"] = ["flake"]
    async with working(world) as client:
        handle = await start(client, steps=2)
        done = await handle.result()
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    assert {role for role, what in world.log if what == "onload"} == {"rollout", "trainer"}
    assert (world.calls["judge_samples"], world.calls["teach_samples"]) == (2, 3)
    assert set(seen.roles) == {"rollout", "trainer"}
    nothing_was_broken(world)
