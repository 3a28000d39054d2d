"""The loop in the other modes, on real parts: roles side by side, or on GPUs of their own; overlap.

Not in CI: ``make slow`` runs it.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from relax_infer.machines import RunState, StepPhase
from relax_infer.samples import from_table
from tests.e2e.conftest import fresh_stack
from tests.e2e.looking import Handle, RunFiles, finish, lease_status, start
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.asyncio(loop_scope="session"),
]

AHEAD = {"mode": "decoupled", "cluster.gpus": 5, "max_staleness": 2}
SPLIT = {"mode": "split", "cluster.gpus": 4}
TWO_JUDGES = {
    "mode": "split",
    "cluster.gpus": 5,
    "genrm.extra_models": [{"model": "tiny:genrm", "model_id": "second"}],
    "reward.combine.rule": "min",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def wide() -> AsyncIterator[tuple[Stack, Client]]:
    """A stack with a GPU for everybody."""
    with fresh_stack(gpus=5) as stack:
        yield (
            stack,
            await Client.connect(stack.temporal_address, data_converter=pydantic_data_converter),
        )


async def finished(client: Client, steps: int, overrides: dict[str, Any]) -> Handle:
    handle = await start(client, steps=steps, overrides={"evaluation.every": 0, **overrides})
    done = await finish(handle, seconds=3000)
    assert done.state is RunState.DONE
    return handle


def version_of(files: RunFiles, step: int) -> int:
    """Of the weights that all of the step's samples were generated with, as each sample says."""
    shards = files.shards(step, "generated").values()
    samples = [sample for name in shards for sample in from_table(files.store.peek(name))]
    assert samples
    (version,) = {sample.weight_version for sample in samples}
    return version


async def test_generation_runs_ahead_and_every_batch_is_fresh_enough(wide: tuple[Stack, Client]):
    stack, client = wide
    handle = await finished(client, 6, AHEAD)
    files = RunFiles(stack.home, handle.id)
    assert [e.result.step for e in files.ledger().entries] == [1, 2, 3, 4, 5, 6]
    assert {files.record(step).outcome for step in range(1, 7)} == {StepPhase.DONE}
    behind = [step - 1 - version_of(files, step) for step in range(1, 7)]
    assert max(behind) > 0, "no step ran ahead"
    assert all(0 <= each <= 2 for each in behind)
    granted = [t.role for t in await transitions(client, handle) if t.event == "GRANTED"]
    assert sorted(granted) == ["genrm", "rollout", "teacher", "trainer"], "each once"


async def test_weights_go_over_a_process_group_to_engines_that_stay_awake(
    wide: tuple[Stack, Client],
):
    stack, client = wide
    group = {"train.weights.transport": "process_group", "max_staleness": 0}
    handle = await finished(client, 2, {**AHEAD, **group})
    files = RunFiles(stack.home, handle.id)
    assert [version_of(files, step) for step in (1, 2)] == [0, 1]
    granted = [t.role for t in await transitions(client, handle) if t.event == "GRANTED"]
    assert granted.count("rollout") == 1
    lines = "".join(path.read_text() for path in (stack.home / "logs" / handle.id).glob("*.log"))
    assert [f"weights {version} were sent" in lines for version in (1, 2)] == [True, True]
    assert "come from disk" not in lines


async def test_roles_side_by_side_train_as_well(wide: tuple[Stack, Client]):
    stack, client = wide
    handle = await finished(client, 2, SPLIT)
    files = RunFiles(stack.home, handle.id)
    assert [e.result.step for e in files.ledger().entries] == [1, 2]
    assert [version_of(files, step) for step in (1, 2)] == [0, 1]


async def test_two_judges_side_by_side_make_one_reward(wide: tuple[Stack, Client]):
    """Each is an engine group of its own; the lease has one role."""
    stack, client = wide
    handle = await finished(client, 2, TWO_JUDGES)
    files = RunFiles(stack.home, handle.id)
    assert [e.result.step for e in files.ledger().entries] == [1, 2]
    logs = sorted(path.name for path in files.folder.glob("engines/requests/engine.genrm.*.jsonl"))
    assert {name.split(".")[2] for name in logs} == {"judge", "second"}
    tables = [files.store.peek(name) for name in files.shards(2, "judged").values()]
    rows = [row for table in tables for row in table.to_pylist()]
    assert {row["reward_source"] for row in rows} <= {"genrm:judge+second", "rule:unfinished"}
    for row in rows:
        if row["reward_source"] != "rule:unfinished":
            told = json.loads(row["reward_detail"])
            assert row["reward"] == min(told[judge]["score"] for judge in ("judge", "second"))


async def transitions(client: Client, handle: Handle) -> tuple[Any, ...]:
    return (await lease_status(client, handle.id)).transitions
