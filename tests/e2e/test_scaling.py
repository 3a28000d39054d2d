"""A policy engine more and one less while requests come in, on real parts.

Not in CI: ``make slow`` runs it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.machines import ReplicaState, RunState, ScaleState
from relax_infer.placement import find_pool
from tests.e2e.conftest import fresh_stack
from tests.e2e.looking import Handle, finish, start, status, until
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

ALONE = {
    "mode": "decoupled",
    "cluster.gpus": 2,
    "rollout.engine.replicas": 1,
    "rollout.prompts_per_step": 8,
    "reward.source": "exact",
    "genrm": None,
    "teacher": None,
    "distillation": None,
    "evaluation.every": 0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def roomy() -> AsyncIterator[tuple[Stack, Client]]:
    """A stack with one GPU that the run does not use."""
    with fresh_stack(gpus=3) as stack:
        yield (
            stack,
            await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter),
        )


class Load:
    """Requests to the router, four at a time, without a pause."""

    def __init__(self, router_url: str) -> None:
        self._url = f"{router_url}/generate"
        self._numbers = itertools.count()
        self.statuses = Counter[int]()
        self.versions = Counter[str]()
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(4)]

    async def _ask(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                body = {
                    "rid": f"load/{next(self._numbers)}",
                    "input_ids": [1, 2, 3],
                    "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
                }
                async with session.post(self._url, json=body) as answer:
                    self.statuses[answer.status] += 1
                    if answer.status == 200:
                        told = await answer.json()
                        self.versions[str(told["meta_info"]["weight_version"])] += 1

    async def answered(self, more: int) -> None:
        """Wait for so many more answers."""
        wanted = self.statuses.total() + more
        await until(lambda: self.statuses.total() >= wanted, 120, f"{more} answers")

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_one_policy_engine_more_and_one_less_under_load(roomy: tuple[Stack, Client]):
    """Every request that the router took was answered, with the weights that the policy is at."""
    stack, client = roomy
    handle = await start(client, steps=50, overrides=ALONE)
    await until(lambda: stepped(handle), 900, "the first step")
    await handle.execute_update("pause")
    await until(lambda: paused(handle), 300, "the pause")
    now = await status(handle)
    assert now is not None
    document = await client.get_workflow_handle(f"{handle.id}.rollout").query("snapshot")
    load = Load(document["models"]["policy"]["router_url"])
    try:
        await load.answered(20)
        out = await scale(client, handle, "out", 2)
        assert out.state is ScaleState.ACTIVE, out
        assert await ready(client, handle) == [0, 1]
        await load.answered(100)
        inward = await scale(client, handle, "in", 1)
        assert inward.state is ScaleState.COMPLETED, inward
        assert await ready(client, handle) == [0]
        await load.answered(20)
    finally:
        await load.end()
    assert set(load.statuses) == {200}, load.statuses
    assert set(load.versions) == {str(now.weight_version)}, load.versions
    with stack.joined_ray("tests"):
        assert find_pool(handle.id, "added-rollout-policy-1") is None
    await handle.execute_update("resume")
    await handle.execute_update("stop")
    assert (await finish(handle)).state is RunState.DONE


async def stepped(handle: Handle) -> bool:
    seen = await status(handle)
    return seen is not None and seen.step >= 1


async def paused(handle: Handle) -> bool:
    seen = await status(handle)
    return seen is not None and seen.state is RunState.PAUSED


async def scale(client: Client, handle: Handle, operation_id: str, replicas: int) -> ScaleStatus:
    request = ScaleRequest(operation_id=operation_id, num_replicas=replicas, wait=True)
    role: Any = client.get_workflow_handle(f"{handle.id}.rollout")
    return await role.execute_update("scale", request, result_type=ScaleStatus)


async def ready(client: Client, handle: Handle) -> list[int]:
    group = client.get_workflow_handle(f"{handle.id}.rollout.policy")
    seen = await group.query("snapshot", result_type=GroupSnapshot)
    return [r.replica for r in seen.replicas if r.state is ReplicaState.READY]
