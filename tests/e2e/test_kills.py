"""The Temporal worker is killed in the middle of a phase and started again: nothing that was
finished is asked for, published or trained again."""

import re
import signal
from collections import Counter

import pytest
from temporalio.client import Client

from relax_infer.machines import RunState, StepPhase
from relax_infer.transfer import partition_name, read_partition, stop_owner
from tests.e2e.looking import Handle, RunFiles, finish, start, step_status, until
from workers.local import Stack

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

CONCURRENCY = 4
SAMPLES = 8
OVERRIDES = {
    "evaluation.every": 0,
    "distillation": None,
    # Few at once, so that a phase lasts long enough to be hit in its middle.
    "rollout.max_concurrency": CONCURRENCY,
    "genrm.max_concurrency": CONCURRENCY,
    "train.mini_batches": 64,
}


async def test_a_killed_worker_costs_only_what_was_in_flight(
    stack: Stack, client: Client, ray: None
):
    """Step 1 is hit while it generates, step 2 while it judges, step 3 while it trains."""
    await stop_owner()  # so that the worker that is killed is the one that starts TransferQueue
    handle = await start(client, steps=3, overrides=OVERRIDES)
    files = RunFiles(stack.home, handle.id)

    await until(lambda: half_done(files, 1, "generated"), 1000, "half of step 1's groups")
    generated_before = kill_worker(stack, files, 1, "generated")
    await until(lambda: half_done(files, 2, "judged"), 200, "half of step 2's verdicts")
    judged_before = kill_worker(stack, files, 2, "judged")
    await until(lambda: trains(client, handle, 3), 200, "step 3's update")
    kill_worker(stack, files, 3, "generated", restart=False)
    rows = await read_partition(partition_name(handle.id, 3))
    assert len(rows.keys) == 256
    assert len(set(rows.keys)) == 256
    stack.start_worker()

    done = await finish(handle)
    assert done.state is RunState.DONE
    assert done.step == 3
    nothing_staged_was_asked_again(files, 1, "generated", generated_before)
    nothing_staged_was_asked_again(files, 2, "judged", judged_before)
    assert files.attempts(3, "generated") == 1
    assert [e.result.step for e in files.ledger().entries] == [1, 2, 3]
    for step in (1, 2, 3):
        record = files.record(step)
        assert record.outcome is StepPhase.DONE
        assert record.result.batch is not None
        assert record.result.batch.groups + record.result.batch.dropped_groups == 32


def half_done(files: RunFiles, step: int, phase: str) -> bool:
    return len(files.shards(step, phase)) >= 12


async def trains(client: Client, handle: Handle, step: int) -> bool:
    seen = await step_status(client, handle.id, step)
    return seen is not None and seen.doing.startswith("trains on")


def kill_worker(
    stack: Stack, files: RunFiles, step: int, phase: str, *, restart: bool = True
) -> set[int]:
    """Groups that were staged at the kill; the worker is really gone in between."""
    stack.kill("worker", signal.SIGKILL)
    assert not stack.alive("worker")
    held = set(files.shards(step, phase))
    if restart:
        stack.start_worker()
    return held


def nothing_staged_was_asked_again(
    files: RunFiles, step: int, phase: str, staged: set[int]
) -> None:
    """From the engines' own request logs."""
    assert 12 <= len(staged) < 32, "the kill was to hit the phase in its middle"
    assert files.attempts(step, phase) >= 2
    events = files.requests(f"{files.ref.run}/{step}/{phase}/")
    admitted = [parts(e["rid"]) for e in events if e["event"] == "admitted"]
    assert max(Counter(admitted).values()) == 1, "a request id reached an engine twice"
    first = {(group, sample) for group, sample, attempt in admitted if attempt == 1}
    later = {(group, sample) for group, sample, attempt in admitted if attempt > 1}
    assert {group for group, _ in later}.isdisjoint(staged)
    # What was in flight, and answers of groups that were not whole yet.
    repeated = first & later
    assert len(repeated) <= CONCURRENCY + 2 * SAMPLES
    ended = {e["rid"]: e["t"] for e in events if e["event"] == "ended"}
    asked = {e["rid"]: e["t"] for e in events if e["event"] == "admitted"}
    for group, sample in repeated:
        stem = f"{files.ref.run}/{step}/{phase}/g{group}/s{sample}/a"
        again = min(t for rid, t in asked.items() if rid.startswith(stem) and rid != f"{stem}1")
        assert ended[f"{stem}1"] < again, f"{stem}1 was not gone before it was asked again"


def parts(rid: str) -> tuple[int, int, int]:
    found = re.search(r"/g(\d+)/s(\d+)/a(\d+)$", rid)
    assert found is not None
    return int(found[1]), int(found[2]), int(found[3])
