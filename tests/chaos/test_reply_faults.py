"""Answers of real engines are lost, late, refused or lies, in one run on the real parts.

A step for each: the lease shows what contract and DESIGN say, the batch is whole and trained once,
and by the actors' own lines no two roles ever held the GPUs at once.
"""

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from relax_infer.machines import RunState
from tests.chaos import faults
from tests.chaos.harm import TABLE, Healing, lease_since, nobody_was_beside_another
from tests.chaos.test_engine_deaths import OVERRIDES, under_way, whole
from tests.e2e.conftest import fresh_stack
from tests.e2e.looking import RunFiles, finish, lease_status, start, until
from workers.local import Stack

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="module"),
]

PATIENCE = 120.0
"""Seconds that a lease gives an operation: the longest launch and a minute."""
LATE = f"{PATIENCE + faults.LATE_SECONDS:.0f} s late"
FAULTS = {
    1: ("genrm", "lost-answer", "the answer to its offload is lost"),
    2: ("genrm", "refusal", "it refuses its offload"),
    # An engine that was ended is launched, not woken, by the next step's onload.
    4: ("genrm", "kept-memory", "it says that it let go and keeps its memory (probe: a double)"),
    6: ("genrm", "death-on-onload", "its scheduler dies as it is woken"),
    7: ("rollout", "wedge", "it never drains: its scheduler stands still"),
    8: ("genrm", "late-answer", f"the answer to its offload is {LATE}"),
}
"""By step: role, fault, and the fault in words."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One whose Python processes read the hook first."""
    hook = str(Path(__file__).parent / "hook")
    with pytest.MonkeyPatch.context() as patch:
        paths = filter(None, (hook, os.environ.get("PYTHONPATH")))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("RELAX_TEST_FAULTS", str(tmp_path_factory.mktemp("faults")))
        patch.setenv("RELAX_TEST_PATIENCE", str(PATIENCE))
        with fresh_stack(gpus=2) as stack:
            yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[Client]:
    yield await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter)


async def test_what_an_engine_says_wrongly_or_not_at_all_gives_its_gpus_to_nobody(
    stack: Stack, client: Client
):
    """pains 3, 4, 19, 20."""
    overrides = OVERRIDES | {
        "lease.operation_timeout": 60,
        "rollout.engine.launch_timeout": 60,
        "genrm.engine.launch_timeout": 60,
        "rollout.engine.drain_timeout": 10,
    }
    handle = await start(client, steps=max(FAULTS), overrides=overrides)
    run, files = handle.id, RunFiles(stack.home, handle.id)
    for step, (role, fault, words) in FAULTS.items():
        await until(lambda s=step: under_way(files, s, "generated"), 600, f"step {step}")
        faults.ask_for(role, fault)
        at = await met(role, fault)
        handed = await until_handed_over(client, run, role, at)
        told = await lease_since(client, run, at)
        TABLE.append(
            Healing(
                what=f"{role}: {words}",
                noticed=await first_change(client, run, at),
                recovered=handed,
                lease=told,
                step="waits and goes on",
            )
        )
    done = await finish(handle, 900)
    assert done.state is RunState.DONE
    whole(files, max(FAULTS))
    nobody_was_beside_another(files)


async def met(role: str, fault: str) -> float:
    await until(lambda: faults.met_at(role, fault) is not None, 400, f"{role} meets {fault}")
    at = faults.met_at(role, fault)
    assert at is not None
    return at


async def until_handed_over(client: Client, run: str, role: str, at: float) -> float:
    """Seconds from the fault to the moment at which another role has the GPUs."""
    found: list[float] = []

    async def handed_over() -> bool:
        changes = (await lease_status(client, run)).transitions
        found[:] = [t.at for t in changes if t.at >= at and t.role != role and t.state == "ACTIVE"]
        return bool(found)

    await until(handed_over, 900, f"another role after {role}")
    return found[0] - at


async def first_change(client: Client, run: str, at: float) -> float:
    changes = (await lease_status(client, run)).transitions
    return min((t.at for t in changes if t.at >= at), default=time.time()) - at
