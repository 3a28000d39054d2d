"""Lease, roles and engine groups continue as new in the middle of a run, and nothing is lost."""

from collections import Counter
from typing import Any

import pytest
from temporalio.client import Client, WorkflowUpdateFailedError

from relax_infer.contracts.lease import LifecycleInput, RoleResult
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.machines import RunState
from tests.workflows.scaled_role import scaled_role
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_lease_updates import ask, lease_of
from tests.workflows.test_training_run import (
    Handle,
    Working,
    in_state,
    lease,
    nothing_was_broken,
    start,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG_LIVED = ("lease", "rollout", "rollout.policy")


async def run_ids(client: Client, handle: Handle) -> dict[str, str | None]:
    """Of the long-lived workflows, as they are now."""
    told = {n: client.get_workflow_handle(f"{handle.id}.{n}") for n in LONG_LIVED}
    return {name: (await at.describe()).run_id for name, at in told.items()}


async def test_a_run_goes_through_many_histories_of_what_outlives_its_steps(
    working_briefly: Working,
):
    world = ScriptedWorld()
    world.faults["train_step"] = ["", "hold"]
    async with working_briefly(world) as client:
        handle = await start(client, steps=3)
        await until(lambda: world.calls["generate_groups"])
        first = await run_ids(client, handle)
        await world.held.wait()  # the trainer holds the GPUs, in the middle of step 2
        second = await run_ids(client, handle)
        world.go_on.set()
        done = await handle.result()
        last = await run_ids(client, handle)
        seen = await lease(client, handle)
    assert done.state is RunState.DONE
    for name in LONG_LIVED:
        assert len({first[name], second[name], last[name]}) == 3, name
    assert Counter(world.log)["rollout", "generate_groups"] == 3
    assert Counter(world.log)["genrm", "judge_samples"] == 3
    assert sorted(world.ledger) == [1, 2, 3]
    assert world.calls["train_step"] == 3 + 1, "the fault that held it is asked for once more"
    counters = [t.fence for t in seen.transitions if t.event == "GRANTED"]
    assert counters == list(range(1, len(counters) + 1)), "one grant for each that was asked for"
    nothing_was_broken(world)


@pytest.mark.wide
async def test_old_operation_ids_are_known_in_later_histories(working_briefly: Working):
    world = ScriptedWorld()
    async with working_briefly(world) as client:
        handle = await start(client, steps=4)
        await until(lambda: world.calls["generate_groups"])
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        at = lease_of(client, handle)
        mine = {"role": "genrm", "purpose": "eval"}
        granted = await ask(at, "acquire", "ada-1", **mine)
        released = await ask(at, "release", "ada-2", role="genrm")
        before = await run_ids(client, handle)
        await handle.execute_update("resume")

        async def all_are_new() -> bool:
            now = await run_ids(client, handle)
            return all(now[name] != before[name] for name in LONG_LIVED)

        await until(all_are_new)
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        loads = world.log.count(("genrm", "onload"))
        assert await ask(at, "acquire", "ada-1", **mine) == granted
        assert await ask(at, "release", "ada-2", role="genrm") == released
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await ask(at, "release", "ada-1", role="genrm")
        assert "different fingerprint" in str(refused.value.cause)
        assert world.log.count(("genrm", "onload")) == loads
        await handle.execute_update("resume")
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


@pytest.mark.wide
async def test_a_group_that_is_asked_again_in_a_later_history_does_nothing_twice(
    working_briefly: Working,
):
    """It gives what it remembers, with what it is by now."""
    world = ScriptedWorld()
    async with working_briefly(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: world.calls["generate_groups"] == 2)
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        group = client.get_workflow_handle(f"{handle.id}.rollout.policy")
        begun = (await group.fetch_history()).events[0].workflow_execution_started_event_attributes
        (carried,) = await client.data_converter.decode(
            begun.input.payloads, type_hints=[LifecycleInput]
        )
        assert carried.carried is not None
        remembered = Answer.model_validate(carried.carried["answers"]["full"][-1])
        assert remembered.result.get("snapshot") is None
        done = Counter(world.log)
        again = Ask(
            operation_id=remembered.operation_id, asker=handle.id, method="onload", payload={}
        )
        await group.signal("ask", again)

        async def answers() -> list[Answer]:
            told = list[Answer]()
            async for event in group.fetch_history_events():
                sent = event.signal_external_workflow_execution_initiated_event_attributes
                if (
                    sent.signal_name == "answer"
                    and sent.workflow_execution.workflow_id == handle.id
                ):
                    told += await client.data_converter.decode(
                        sent.input.payloads, type_hints=[Answer]
                    )
            return told

        await until(answers)
        (told,) = await answers()
        news = RoleResult.model_validate(told.result)
        assert news.model_copy(update={"snapshot": None}) == RoleResult.model_validate(
            remembered.result
        )
        assert news.snapshot is not None
        assert news.snapshot.number > int(carried.carried["told"])
        assert Counter(world.log) == done
        await handle.execute_update("resume")
        assert (await handle.result()).state is RunState.DONE
    nothing_was_broken(world)


async def test_a_role_says_in_a_later_history_where_its_router_is(working_briefly: Working):
    """A gateway that starts empty asks, maybe long before anything is published again."""
    world = ScriptedWorld()
    async with scaled_role(working_briefly, world) as role:
        told, pushes = world.pushes[-1].document, len(world.pushes)
        assert router_of(told) is not None
        first = (await role.handle.describe()).run_id
        for _ in range(30):
            await role.scale(num_replicas=2, dry_run=True)
            if (await role.handle.describe()).run_id != first:
                break
        else:
            raise AssertionError("its history did not become long enough")
        assert len(world.pushes) == pushes
        now = await role.handle.query("registry")
        assert router_of(now["document"]) == router_of(told)
        await role.stop()


def router_of(document: dict[str, Any]) -> str | None:
    (model,) = document["models"].values()
    return model["router_url"]
