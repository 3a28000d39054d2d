"""Placement groups whose cleanup fails, or that are somebody else's."""

import asyncio
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import Client

from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.run import ResolveRun
from relax_infer.machines import ReplicaState, RunState
from relax_infer.placement import binding, find_pool, pools, release_pools
from tests.acceptance.source import modules_that_name
from tests.workflows.scripted_world import ScriptedWorld, until
from tests.workflows.test_training_run import (
    Handle,
    Working,
    blocked,
    in_state,
    nothing_was_broken,
    running,
    start,
    status,
)

GROUP_ID = "ab" * 18


class Cluster:
    """Ray's table of placement groups, and a removal that can be out of order."""

    def __init__(self, *names: str) -> None:
        self.states = dict.fromkeys(names, "CREATED")
        self.removes = True

    def table(self) -> dict[str, Any]:
        return {
            f"{number:036x}": {"name": name, "state": state}
            for number, (name, state) in enumerate(self.states.items(), 1)
        }

    def remove(self, group: Any) -> None:
        if self.removes:
            entry = self.table()[group.id.hex()]
            self.states[entry["name"]] = "REMOVED"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    # ray.util has a function of that name, too.
    of_ray = importlib.import_module("ray.util.placement_group")
    made = Cluster("relax-mine.pool", "relax-other.pool")
    monkeypatch.setattr(pools, "group_table", made.table)
    monkeypatch.setattr(of_ray, "remove_placement_group", made.remove)
    return made


async def test_cleanup_of_an_owned_placement_group_fails(cluster: Cluster) -> None:
    """The error is raised, the group is still known under its name, and a retry removes it."""
    cluster.removes = False
    with pytest.raises(TransientError, match=r"relax-mine\.pool is there after"):
        await release_pools("mine", timeout=0.0)
    assert find_pool("mine") is not None
    cluster.removes = True
    await release_pools("mine")
    assert find_pool("mine") is None
    assert find_pool("other") is not None


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("name", "what", "gone"),
    [
        ("release_placement", "the placement group", False),
        ("close_transfer_queue", "TransferQueue's partitions", False),
        ("stop_front", "router and gateway", True),
    ],
)
async def test_a_run_whose_cleanup_fails_waits_and_tries_it_again(
    working: Working, name: str, what: str, gone: bool
) -> None:
    """It does not end and leave something behind that nobody would ever take down; the word of a
    person who saw that it is gone ends the wait too."""
    world = ScriptedWorld(evaluation_every=0, judged_by_genrm=False, distilled=False)
    world.faults[name] = ["refuse", "refuse"]
    word = ResolveRun(who="ada", why="looked")
    async with working(world) as client:
        handle = await start(client, steps=1)
        for tries in (1, 2):
            await until(lambda tries=tries: waits(world, handle, name, tries), seconds=240)
            assert f"cannot take down {what}: {name} refused" in (await status(handle)).doing
            assert not any(engine.holds for engine in world.engines.engines.values())
            last = gone and tries == 2
            await handle.execute_update(
                "resolve", word.model_copy(update={"confirm_released": last})
            )
        done = await handle.result()
    assert done.state is RunState.DONE
    assert world.calls[name] == (2 if gone else 3)
    assert world.calls["release_placement"] >= 1
    nothing_was_broken(world)


async def waits(world: ScriptedWorld, handle: Handle, name: str, tries: int) -> bool:
    return world.calls[name] == tries and await blocked(handle)


@pytest.mark.asyncio(loop_scope="session")
async def test_shutdown_with_a_borrowed_placement_group(working: Working) -> None:
    """A role's engines use the run's group; when they stop it stays, and no code of theirs could
    remove it."""
    world = ScriptedWorld()
    async with working(world) as client:
        handle = await start(client, steps=2)
        await until(lambda: running(handle))
        await handle.execute_update("pause")
        await until(lambda: in_state(handle, RunState.PAUSED))
        await shut_down(client, handle, "genrm")
        assert world.engines.engines["genrm", 0].state is ReplicaState.DEAD
        assert world.calls["release_placement"] == 0
    assert modules_that_name("remove_placement_group") == {pools.__name__}


async def shut_down(client: Client, handle: Handle, role: str) -> None:
    stopped = client.get_workflow_handle(f"{handle.id}.{role}")
    await stopped.execute_update("shutdown", result_type=RoleResult)


@pytest.mark.parametrize("there_before", [True, False])
async def test_placement_group_ownership_and_rollback(
    there_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binding that fails gives back what it made, and nothing that it found."""
    group: Any = SimpleNamespace(id=SimpleNamespace(hex=lambda: GROUP_ID), bundle_count=2)
    removed: list[str] = []

    async def make_or_find(run: str, sizes: Any, made: list[Any], *_: Any) -> dict[str, Any]:
        if not there_before:
            made.append(asyncio.ensure_future(asyncio.sleep(0, group)))
        return {"pool": group}

    async def never_placed(*_: Any) -> None:
        raise TransientError("a node was lost")

    async def remove(chosen: Any, timeout: float) -> None:
        removed.extend(i for i in (GROUP_ID, "another") if chosen(i, {"name": "relax-run.pool"}))

    monkeypatch.setattr(binding, "_make_or_find", make_or_find)
    monkeypatch.setattr(binding, "_placed", never_placed)
    monkeypatch.setattr(binding, "remove_groups", remove)
    with pytest.raises(TransientError, match="a node was lost"):
        await binding.bind_pool("run", 2, 60)
    assert removed == ([] if there_before else [GROUP_ID])
