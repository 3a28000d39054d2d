"""The whole stack goes down in the middle of a step, and Ray alone dies: the run's placement
groups, actors and TransferQueue's rows are gone with it. Up again, the run goes on by itself."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from relax_infer.contracts.run import RunStatus
from tests.chaos.harm import TABLE, Healing, lease_since, nobody_was_beside_another
from tests.chaos.test_engine_deaths import OVERRIDES, under_way, whole
from tests.e2e.conftest import fresh_stack
from tests.e2e.looking import Handle, RunFiles, finish, start, status, step_status, until
from workers.local import Stack, down, up

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(2400),
    pytest.mark.asyncio(loop_scope="module"),
]

STEPS = 4
Harm = Callable[[Stack], None]


async def test_a_stack_that_is_brought_up_again_goes_on_with_its_runs():
    """As after a power cut, at the worst moments: step 1 generates, step 2 trains on rows that are
    lost with TransferQueue, step 3 is judged."""
    with fresh_stack(gpus=2) as stack:
        home = stack.home
        client = await connected(stack)
        handle = await start(client, steps=STEPS, overrides=OVERRIDES)
        files = RunFiles(home, handle.id)

        async def again(step: int, what: str, moment: Callable[[], Any], harm: Harm) -> None:
            nonlocal stack, client, handle
            await until(moment, 900, f"the moment when step {step} {what}")
            at = time.time()
            harm(stack)
            stack = up(home, gpus=2)
            back = time.time() - at
            client = await connected(stack)
            handle = client.get_workflow_handle(handle.id, result_type=RunStatus)
            await until(lambda: ended(handle, step), 900, f"the end of step {step}", every=1.0)
            TABLE.append(
                Healing(
                    what=f"{harm.__doc__} while step {step} {what}",
                    noticed=back,
                    recovered=time.time() - at,
                    lease=await lease_since(client, handle.id, at),
                    step="up again by hand; goes on by itself; whole: its end",
                )
            )

        await again(1, "generates", lambda: under_way(files, 1, "generated"), take_down)
        await again(2, "trains", lambda: trains(client, handle, 2), take_down)
        await again(3, "is judged", lambda: under_way(files, 3, "judged"), kill_ray)
        done = await finish(handle)
        assert done.step == STEPS
        whole(files, STEPS)
        nobody_was_beside_another(files)


def take_down(stack: Stack) -> None:
    """`relax-infer down`"""
    assert not down(stack.home).left


def kill_ray(stack: Stack) -> None:
    """all of Ray (SIGKILL; engines outlive it)"""
    head = stack.processes["ray"].pid
    children = Path(f"/proc/{head}/task/{head}/children").read_text().split()
    assert len(children) >= 2, "the control plane and a raylet"
    for pid in map(int, children):
        os.kill(pid, signal.SIGKILL)
    if stack.alive("ray"):  # it may end by itself when it sees that
        stack.kill("ray")


async def connected(stack: Stack) -> Client:
    return await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter)


async def ended(handle: Handle, step: int) -> bool:
    seen = await status(handle)
    return seen is not None and seen.step >= step


async def trains(client: Client, handle: Handle, step: int) -> bool:
    seen = await step_status(client, handle.id, step)
    return seen is not None and seen.doing.startswith("trains on")
