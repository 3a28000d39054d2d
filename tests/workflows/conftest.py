"""A Temporal server for the tests of this folder, and a worker over the scripted world."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Interceptor, Worker

from relax_infer.contracts.policies import QUEUES
from tests.workflows.scripted_world import ScriptedWorld
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._temporal import DYNAMIC
from workflows import WORKFLOWS
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

BRIEF = ("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=60")
"""Every long-lived workflow continues as new again and again, within a run of a few steps."""


@asynccontextmanager
async def _server(*options: str) -> AsyncIterator[Client]:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).parent / "temporal"),
        data_converter=pydantic_data_converter,
        search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
        dev_server_extra_args=list(options),
    ) as environment:
        yield environment.client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[Client]:
    async with _server(*DYNAMIC) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def brief_temporal() -> AsyncIterator[Client]:
    async with _server(*DYNAMIC, *BRIEF) as client:
        yield client


@pytest.fixture
def working(temporal: Client) -> Callable[..., AbstractAsyncContextManager[Client]]:
    """``async with working(world) as client``: workers over the scripted world on all queues.

    With ``cached_workflows=0`` every workflow task is handled by a worker that knows nothing of the
    workflow but its history, as if each had been killed after the one before.
    """
    return _working(temporal)


@pytest.fixture
def working_briefly(
    brief_temporal: Client,
) -> Callable[..., AbstractAsyncContextManager[Client]]:
    """Like ``working``, on a server with short histories."""
    return _working(brief_temporal)


def _working(temporal: Client) -> Callable[..., AbstractAsyncContextManager[Client]]:
    @asynccontextmanager
    async def work(
        world: ScriptedWorld,
        interceptors: Sequence[Interceptor] = (),
        *,
        cached_workflows: int = 1000,
    ) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            for queue in QUEUES:
                worker = Worker(
                    temporal,
                    task_queue=queue,
                    workflows=WORKFLOWS if queue == "relax" else [],
                    activities=world.activities(),
                    workflow_runner=workflow_runner(),
                    max_cached_workflows=cached_workflows,
                    workflow_failure_exception_types=FAILS_WORKFLOW,
                    interceptors=interceptors,
                    sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
                )
                await stack.enter_async_context(worker)
            try:
                yield temporal
            finally:
                await _end_all(temporal)

    return work


async def _end_all(client: Client) -> None:
    """What a test left running must not ask the next test's world for anything.

    What was begun meanwhile, or is listed a moment late, is found by another look.
    """
    while left := [each.id async for each in client.list_workflows("ExecutionStatus = 'Running'")]:
        for name in left:
            with contextlib.suppress(RPCError):  # it has just ended by itself
                await client.get_workflow_handle(name).terminate("its test is over")
        await asyncio.sleep(0.2)
