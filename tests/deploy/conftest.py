"""A Temporal server of its own for this folder: versions of a deployment are of a namespace."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from workers._converter import data_converter
from workers._temporal import DYNAMIC
from workflows._visible import REWARD, ROLE, RUN, STATE, STEP, WEIGHT_VERSION

TEMPORAL = str(Path(sys.executable).parent / "temporal")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal() -> AsyncIterator[Client]:
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=TEMPORAL,
        data_converter=data_converter(),
        search_attributes=[RUN, STEP, ROLE, STATE, WEIGHT_VERSION, REWARD],
        dev_server_extra_args=list(DYNAMIC),
    ) as environment:
        yield environment.client
