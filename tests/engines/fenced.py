"""The fence over real HTTP, around an engine that does as it is told: in it, and as a proxy."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from relax_infer.contracts.fence import FenceToken
from tests.engines.fake_engine import FencedFake, fenced_fake

__all__ = ["LATER", "ask", "fake", "started"]

LATER = FenceToken(counter=2, grant_id="b")


@pytest.fixture(params=["in the engine", "as a proxy"])
async def fake(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[FencedFake, aiohttp.ClientSession]]:
    """What the fence promises does not depend on where it stands."""
    async with fenced_fake(tmp_path, remote=request.param == "as a proxy") as made:
        yield made


async def ask(client: aiohttp.ClientSession, rid: str, **more: object):
    async with client.post("/generate", json={"rid": rid, **more}) as response:
        return response.status, await response.json()


async def started(fake: FencedFake, client: aiohttp.ClientSession, rid: str):
    task = asyncio.create_task(ask(client, rid))
    await fake.until(lambda: rid in fake.engine.running)
    return task
