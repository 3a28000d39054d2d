"""Engines that others started: adopted, given new weights, dropped, let go of (contract 7.10)."""

from typing import Any

import pytest

from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.scale import ScaleFailure, ScaleStatus
from relax_infer.machines import ScaleState
from tests.workflows.scaled_role import ScaledRole, Working, scaled_role
from tests.workflows.scripted_externals import ScriptedExternal
from tests.workflows.scripted_world import ScriptedWorld, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ONE, TWO = "http://10.0.0.7:30000", "http://10.0.0.8:30000"


def world_with(**engines: ScriptedExternal) -> ScriptedWorld:
    world = ScriptedWorld()
    named = {"one": ONE, "two": TWO}
    world.externals.there = {named[name]: engine for name, engine in engines.items()}
    return world


async def known(role: ScaledRole) -> dict[str, ExternalEngine]:
    every = await role.handle.query("externals", result_type=list[ExternalEngine])
    return {engine.url: engine for engine in every}


def routed(role: ScaledRole) -> set[str]:
    """Of others, in the router."""
    told = [p.router_others for p in role.world.pushes if p.router_others is not None]
    return set(told[-1]) if told else set()


async def adopt(role: ScaledRole, *urls: str, **fields: Any) -> ScaleStatus:
    return await role.scale(engine_urls=urls or (ONE,), direction="out", **fields)


async def test_one_is_adopted_with_the_weights_of_its_siblings_and_follows_them(working: Working):
    world = world_with(one=ScriptedExternal(7))
    async with scaled_role(working, world) as role:
        done = await adopt(role, f"{ONE}/")
        assert done.state is ScaleState.ACTIVE
        assert [(r.url, r.outcome) for r in done.replicas] == [(ONE, "added")]
        assert world.externals.there[ONE].loaded == [0], "other weights were loaded first"
        assert routed(role) == {ONE}
        assert role.shown()["policy/external-10.0.0.7:30000"] == "READY"
        assert (await adopt(role)).state is ScaleState.NOOP
        await role.bring_up(version=1)
        await until(lambda: routed(role) == {ONE})
        assert world.externals.there[ONE].loaded == [0, 1]
        gone = await role.scale(engine_urls=(ONE,), direction="in")
        assert gone.state is ScaleState.COMPLETED
        assert [(r.url, r.outcome) for r in gone.replicas] == [(ONE, "removed")]
        assert routed(role) == set()
        assert await known(role) == {}
        await role.holds_only(0, 1)
    assert world.externals.there[ONE].answers, "it was not stopped"
    assert world.engines.stops == []


async def test_what_is_lost_or_does_not_take_weights_is_dropped_and_listed(working: Working):
    world = world_with(one=ScriptedExternal(0), two=ScriptedExternal(0))
    async with scaled_role(working, world) as role:
        assert (await adopt(role, ONE, TWO)).state is ScaleState.ACTIVE
        world.externals.there[ONE].answers = False
        await until(lambda: routed(role) == {TWO})
        assert (await known(role))[ONE].state == "DROPPED"
        world.externals.there[TWO].loads = False
        await role.bring_up(version=1)
        await until(lambda: dropped(role, TWO))
        assert routed(role) == set()
        world.externals.there[ONE].answers = True
        assert (await adopt(role)).state is ScaleState.ACTIVE, "a person may ask again"
        assert routed(role) == {ONE}
        world.externals.there[ONE].version = 5
        await until(lambda: dropped(role, ONE))
        assert "somebody else loaded version 5" in ((await known(role))[ONE].why or "")
    assert world.violations == []


async def dropped(role: ScaledRole, url: str) -> bool:
    return (await known(role))[url].state == "DROPPED"


@pytest.mark.parametrize("on_partial", ["keep", "rollback_all"])
async def test_of_several_those_that_are_right_are_kept_or_none(working: Working, on_partial: str):
    world = world_with(one=ScriptedExternal(3, loads=False), two=ScriptedExternal(0))
    async with scaled_role(working, world) as role:
        nobody = "http://10.0.0.9:1"
        done = await adopt(role, ONE, TWO, "nonsense", nobody, on_partial=on_partial)
        rows = {row.url: (row.outcome, row.failure) for row in done.replicas}
        assert rows[ONE] == ("failed", ScaleFailure.WEIGHT_SYNC_FAILED)
        assert rows["nonsense"] == ("failed", ScaleFailure.INVALID_ENGINE_ADDRESS)
        assert rows[nobody] == ("failed", ScaleFailure.EXTERNAL_ENGINE_CONNECT_FAILED)
        if on_partial == "keep":
            assert done.state is ScaleState.PARTIAL
            assert rows[TWO] == ("added", None)
            assert routed(role) == {TWO}
        else:
            assert done.state is ScaleState.FAILED
            assert rows[TWO][0] == "failed"
            assert routed(role) == set()
            assert await known(role) == {}


async def test_a_router_that_does_not_take_it_leaves_it_out(working: Working):
    world = world_with(one=ScriptedExternal(0))
    async with scaled_role(working, world) as role:
        world.faults["push_registry"] = ["refuse"]
        done = await adopt(role)
        assert done.state is ScaleState.FAILED
        assert done.replicas[0].failure is ScaleFailure.ROUTER_REGISTRATION_FAILED
        assert await known(role) == {}
        assert (await adopt(role)).state is ScaleState.ACTIVE
        world.faults["push_registry"] = ["refuse"]
        stays = await role.scale(engine_urls=(ONE,), direction="in")
        assert stays.state is ScaleState.FAILED
        assert stays.replicas[0].failure is ScaleFailure.ROUTER_REMOVAL_FAILED
        assert set(await known(role)) == {ONE}
        world.externals.there[ONE].busy = 3
        gone = await role.scale(engine_urls=(ONE,), direction="in", drain_timeout=1)
        assert gone.state is ScaleState.COMPLETED
        assert gone.replicas[0].why == "it still works on 3 requests, of whomever"


async def test_a_role_that_takes_turns_has_no_engines_of_others(working: Working):
    world = world_with(one=ScriptedExternal(0))
    async with scaled_role(working, world, shares_with=("trainer",)) as role:
        told = await role.refused(engine_urls=(ONE,), direction="out")
        assert "has no fence" in told
        assert world.calls["check_external"] == 0


async def test_weights_that_never_change_are_compared_and_not_loaded(working: Working):
    world = world_with(one=ScriptedExternal(None), two=ScriptedExternal(3))
    async with scaled_role(working, world, "genrm") as role:
        done = await adopt(role, ONE, TWO)
        assert done.state is ScaleState.PARTIAL
        assert {r.url: r.outcome for r in done.replicas} == {ONE: "added", TWO: "failed"}
        assert world.externals.there[TWO].loaded == []
        assert role.shown()["genrm/external-10.0.0.7:30000"] == "READY"
