"""Scale operations in any order with any faults: what there was before is what there is after."""

import random
from collections import Counter
from typing import Any

import pytest

from relax_infer.contracts.scale import ScaleStatus
from relax_infer.machines import ScaleState
from tests.marks import wide
from tests.workflows.scaled_role import ScaledRole, Working, scaled_role
from tests.workflows.scripted_externals import ScriptedExternal
from tests.workflows.scripted_world import ScriptedWorld, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

OTHERS = ("http://10.0.0.7:30000", "http://10.0.0.8:30000")
FAULTS = {
    "bind_added_replica": ("late", "refuse", "lose_reply", "flake"),
    "probe_engines": ("flake", "refuse"),
    "launch_engines": ("die", "exit", "lose_reply"),
    "load_engine_weights": ("die", "die_hidden", "lose_reply", "refuse"),
    "onload_engines": ("other_weights", "lose_reply"),
    "push_registry": ("refuse", "flake"),
    "drain_engine": ("busy", "flake"),
    "stop_engines": ("lose_reply",),
    "release_added_replica": ("refuse", "lose_reply", "flake"),
    "check_external": ("refuse", "flake"),
    "drain_external": ("refuse",),
}
"""What may go wrong with each step of an operation."""


class Chance:
    """Operations by a seed, and the faults that meet them."""

    def __init__(self, role: ScaledRole, seed: int) -> None:
        self.role, self.random = role, random.Random(seed)
        self.states = Counter[str]()
        self.done: list[ScaleStatus] = []

    async def operation(self) -> None:
        world, dice = self.role.world, self.random
        for name in dice.sample(sorted(FAULTS), dice.choice((0, 1, 1, 2))):
            world.faults[name] = [dice.choice(FAULTS[name])]
        status = await self.role.scale(**await self._asked())
        assert status.ended
        self.states[status.state] += 1
        self.done.append(status)
        for name in FAULTS:
            world.faults[name] = []
        if dice.random() < 0.5:  # somebody looked at the node
            for engine in world.engines.engines.values():
                engine.hides = False
        if dice.random() < 0.15:
            await self.role.bring_up(version=self.role.version + 1)

    async def _asked(self) -> dict[str, Any]:
        dice = self.random
        kind = dice.choice(("out", "out", "in", "in", "address", "others"))
        there = len(await self.role.ready())
        match kind:
            case "out":
                return {"num_replicas": there + dice.choice((1, 2))}
            case "others":
                direction = dice.choice(("out", "in"))
                return {
                    "engine_urls": (dice.choice(OTHERS),),
                    "direction": direction,
                    "on_partial": dice.choice(("keep", "rollback_all")),
                }
            case "address":
                left = [r.url for r in (await self.role.outsiders()).values() if r.url]
                added = [await self.role.url(k) for k in await self.role.ready() if k >= 2]
                if urls := left + added:
                    return {"engine_urls": (dice.choice(urls),), "force": dice.random() < 0.3}
        return {"num_replicas": max(2, there - 1), "force": dice.random() < 0.3}

    async def agrees(self) -> None:
        """Placement groups and processes are those of the replicas that there are and of what is
        listed as left; nobody is routed but those that answer."""
        role, world = self.role, self.role.world
        left = {k for k, record in (await role.outsiders()).items() if record.stage == "left"}
        ready = set(await role.ready())
        assert set(role.pools()) <= left | ready
        living = {k for (_, k), engine in world.engines.engines.items() if engine.holds}
        assert living <= left | ready
        assert ready <= living
        await until(lambda: role.routed() == len(ready))
        assert world.violations == []


async def _random_operations(working: Working, number: int, seed: int, **fields: Any) -> Chance:
    world = ScriptedWorld()
    world.externals.there = {OTHERS[0]: ScriptedExternal(0), OTHERS[1]: ScriptedExternal(9)}
    async with scaled_role(working, world, **fields) as role:
        await role.holds_only(0, 1)
        chance = Chance(role, seed)
        for _ in range(number):
            await chance.operation()
            await chance.agrees()
        for engine in world.engines.engines.values():
            engine.hides = False
        await role.scale(num_replicas=2, force=True)
        await role.scale(engine_urls=OTHERS, direction="in")
        await role.holds_only(0, 1)
        assert await role.outsiders() == {}
        assert {r.base_url for r in (await role.group()).replicas} == {
            await role.url(0),
            await role.url(1),
        }
        await role.stop()
    # Every placement group that was made was removed once, and none is left, nor a process.
    assert world.pools.there == {}
    assert world.pools.made == world.pools.removed
    assert not any(engine.holds for engine in world.engines.engines.values())
    assert world.violations == []
    return chance


@pytest.mark.parametrize("seed", [1, *wide(2)])
async def test_a_few_operations_with_faults_leave_nothing(working: Working, seed: int):
    chance = await _random_operations(working, 6, seed)
    assert sum(chance.states.values()) == 6


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [11, 12, 13])
async def test_fifty_operations_with_faults_leave_nothing(working: Working, seed: int):
    """By workers that are killed after every decision."""
    chance = await _random_operations(working, 50, seed, cached_workflows=0)
    reached = {ScaleState.ACTIVE, ScaleState.COMPLETED, ScaleState.PARTIAL, ScaleState.FAILED}
    assert reached - {ScaleState.PARTIAL} <= set(chance.states), chance.states
