"""One real local stack for the tests of this folder: Temporal, Ray, worker; engines per run."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from tests.e2e.looking import end_what_was_started
from tests.stack.conftest import marked_home
from tests.tiny_models import models_kept
from workers.local import Stack, down, up


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """A fresh one, or the one that is up in ``RELAX_E2E_HOME`` (to save time while developing)."""
    if kept := os.environ.get("RELAX_E2E_HOME"):
        yield Stack.load(Path(kept))
        return
    with fresh_stack(gpus=2) as stack:
        yield stack


@contextmanager
def fresh_stack(gpus: int) -> Iterator[Stack]:
    """Up, and down again with nothing left of it."""
    home = Path(tempfile.mkdtemp(prefix="relax-e2e-"))
    with models_kept(home):
        stack = up(home, gpus=gpus)
        try:
            yield stack
        finally:
            report = down(home)
            assert not report.left, f"down left processes behind: {report.left}"
            assert not (left := marked_home(home)), f"down does not know of {left}"
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="package")
def ray(stack: Stack) -> Iterator[None]:
    """This process joins the stack's Ray cluster, to look at actors."""
    with stack.joined_ray("tests"):
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    yield await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter)
    await asyncio.sleep(0)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_runs_on(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """A test that failed in the middle of its run must not keep the GPUs from those after it."""
    yield
    there = getattr(request.node, "funcargs", None) or {}
    if isinstance(client := there.get("client"), Client):
        await end_what_was_started(client)
