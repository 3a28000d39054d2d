"""Router and gateway are killed, at work and while nobody asks them anything."""

import asyncio
import os
import signal
import time
from typing import Any

import aiohttp
import pytest
from temporalio.client import Client

from relax_infer.gateway.front import Front
from relax_infer.machines import RunState
from tests.chaos.harm import TABLE, Healing, lease_since, nobody_was_beside_another
from tests.chaos.test_engine_deaths import OVERRIDES, under_way, whole
from tests.e2e.looking import RunFiles, finish, start, step_status, until
from workers.local import Stack

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_a_dead_router_or_gateway_is_started_again_and_given_what_it_knew(
    stack: Stack, client: Client, ray: None
):
    """pains 11. At work: the phase asks again for what is missing. At rest: nobody notices."""
    handle = await start(client, steps=2, overrides=OVERRIDES)
    run, files = handle.id, RunFiles(stack.home, handle.id)
    for part, phase in (("router", "generated"), ("gateway", "judged")):
        await until(lambda p=phase: under_way(files, 1, p), 400, f"step 1's {phase}")
        staged = set(files.shards(1, phase))
        TABLE.append(await killed(client, run, part, "at work"))
        await until(lambda p=phase: len(files.shards(1, p)) == 32, 200, f"all of {phase}")
        assert staged <= set(files.shards(1, phase))

    async def trains() -> bool:
        seen = await step_status(client, run, 2)
        return seen is not None and seen.phase == "TRAINING"

    await until(trains, 400, "step 2's training")
    for part in ("router", "gateway"):
        TABLE.append(await killed(client, run, part, "at rest"))
    done = await finish(handle)
    assert done.state is RunState.DONE
    whole(files, 2)
    nobody_was_beside_another(files)


async def killed(client: Client, run: str, part: str, when: str) -> Healing:
    """SIGKILL one of the two; returns once it serves what it served before."""
    before = await described(run)
    workers = set(before["router_workers"])
    os.kill(before[f"{part}_pid"], signal.SIGKILL)
    at = time.time()
    noticed: float | None = None
    while True:
        await asyncio.sleep(0.05)
        now = await described(run)
        if now[f"{part}_pid"] == before[f"{part}_pid"]:
            continue
        noticed = noticed or time.time() - at
        if await (routes(now["router_url"], workers) if part == "router" else knows(now)):
            break
        assert time.time() - at < 120, f"the {part} does not come back"
    assert now[f"{part}_url"] == before[f"{part}_url"]
    return Healing(
        what=f"{part} SIGKILL, {when}",
        noticed=noticed,
        recovered=time.time() - at,
        lease=await lease_since(client, run, at),
        step="asks again for what is missing" if when == "at work" else "does not notice",
    )


async def described(run: str) -> dict[str, Any]:
    found = await Front(run).describe()
    assert found is not None
    return found


async def routes(url: str, workers: set[str]) -> bool:
    """Whether the router has its workers back, or may have none now."""
    held = (await fetched(f"{url}/workers")).get("workers")
    return held is not None and {worker["url"] for worker in held} >= workers


async def knows(front: dict[str, Any]) -> bool:
    """Whether the gateway has a registry of every role of the run."""
    shown = [await fetched(f"{front['gateway_url']}/{r}/engines") for r in ("rollout", "genrm")]
    return all("registry_epoch" in document for document in shown)


async def fetched(url: str) -> dict[str, Any]:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.json() if answer.status == 200 else {}
    except (aiohttp.ClientError, OSError):
        return {}
