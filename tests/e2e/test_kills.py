"""The Temporal worker is killed in the middle of a phase and started again: nothing that was
finished is asked for, published or trained again."""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import pytest
from temporalio.client import Client

from relax_infer.machines import RunState, StepPhase
from relax_infer.transfer import (
    list_partitions,
    open_queue,
    partition_name,
    read_partition,
    stop_owner,
)
from tests.e2e.looking import Handle, RunFiles, finish, start, step_status, until
from workers.local import Stack

pytestmark = [
    pytest.mark.wide,
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

CONCURRENCY = 4
OVERRIDES = {
    "evaluation.every": 0,
    # Few at once, so that a phase lasts long enough to be hit in its middle.
    "rollout.max_concurrency": CONCURRENCY,
    "genrm.max_concurrency": CONCURRENCY,
    "teacher.max_concurrency": CONCURRENCY,
    "train.mini_batches": 64,
}
HIT = {1: "generated", 2: "judged", 3: "taught"}
"""Phase in which the worker is killed, by step."""


@dataclass(frozen=True)
class Kill:
    """What was true when a worker was killed."""

    at: float
    """A moment before, in seconds since the epoch."""
    staged: frozenset[int]
    """Groups that were staged whole."""


async def test_a_killed_worker_costs_only_what_was_in_flight(
    stack: Stack, client: Client, ray: None
):
    """A step is hit while it generates, one while it judges, one while the Teacher scores, the last
    while it trains; the worker that is killed then is the one that started TransferQueue."""
    handle = await start(client, steps=4, overrides=OVERRIDES)
    files = RunFiles(stack.home, handle.id)
    kills: dict[int, Kill] = {}
    for step, phase in HIT.items():
        shards = partial(files.shards, step, phase)
        await until(partial(twelve, shards), 1000, f"twelve groups of step {step} {phase}")
        now = time.time()
        kill_worker(stack)
        kills[step] = Kill(now, frozenset(shards()))
        if phase == "taught":
            await stop_owner()
        stack.start_worker()

    await until(lambda: trains(client, handle, 4), 200, "the update of step 4")
    queue = await open_queue()
    kill_worker(stack)
    assert files.ledger().entries[-1].result.step == 3, "the kill was to hit the update"
    rows = await read_partition(partition_name(handle.id, 4))
    assert len(rows.keys) == len(set(rows.keys)) == 256
    assert await list_partitions(handle.id) == [partition_name(handle.id, 4)]
    stack.start_worker()
    assert await open_queue() == queue, "the queue that the killed worker started"

    done = await finish(handle)
    assert done.state is RunState.DONE
    assert done.step == 4
    for step, phase in HIT.items():
        nothing_staged_was_asked_again(files, step, phase, kills[step])
    assert files.attempts(4, "generated") == 1
    assert await times_asked(client, handle, 4, "train_step") >= 2
    assert [e.result.step for e in files.ledger().entries] == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        record = files.record(step)
        assert record.outcome is StepPhase.DONE
        batch, training = record.result.batch, record.result.training
        assert batch is not None
        assert training is not None
        assert batch.groups + batch.dropped_groups == 32
        assert batch.samples == 8 * batch.groups == training.rows


def twelve(shards: Callable[[], dict[int, str]]) -> bool:
    return len(shards()) >= 12


async def trains(client: Client, handle: Handle, step: int) -> bool:
    seen = await step_status(client, handle.id, step)
    return seen is not None and seen.doing.startswith("trains on")


async def times_asked(client: Client, handle: Handle, step: int, activity: str) -> int:
    """Attempts of a step's activity, those of killed workers too."""
    history = await client.get_workflow_handle(f"{handle.id}.step-{step}").fetch_history()
    named = {
        event.event_id
        for event in history.events
        if event.activity_task_scheduled_event_attributes.activity_type.name == activity
    }
    started = [event.activity_task_started_event_attributes for event in history.events]
    return sum(each.attempt for each in started if each.scheduled_event_id in named)


def kill_worker(stack: Stack) -> None:
    stack.kill("worker", signal.SIGKILL)
    assert not stack.alive("worker")


def nothing_staged_was_asked_again(files: RunFiles, step: int, phase: str, kill: Kill) -> None:
    """From the engines' own request logs. A group is staged whole: what was answered of one that
    was not whole is asked again with what was in flight."""
    assert 12 <= len(kill.staged) < 32, "the kill was to hit the phase in its middle"
    events = files.requests(f"{files.ref.run}/{step}/{phase}/")
    asked = {Asked.of(e["rid"]): e["t"] for e in events if e["event"] == "admitted"}
    ended = {Asked.of(e["rid"]): e["t"] for e in events if e["event"] == "ended"}
    assert len(asked) == sum(e["event"] == "admitted" for e in events), "an engine met one twice"

    first = {each for each in asked if each.attempt == 1}
    in_flight = {each for each in first if asked[each] <= kill.at < ended[each]}
    assert 1 <= len(in_flight) <= CONCURRENCY
    open_groups = {each.group for each in first} - kill.staged
    assert len(open_groups) <= 2 * CONCURRENCY, "groups are begun one after another"
    later = {each for each in asked if each.attempt > 1}
    assert {each.group for each in later} == set(range(32)) - kill.staged
    repeated = {each: each.at_first for each in later if each.at_first in first}
    assert repeated, "nothing was in flight"
    assert {each.group for each in repeated} <= open_groups
    for again, before in repeated.items():
        assert ended[before] < asked[again], f"{before} was not gone before it was asked again"


class Asked(NamedTuple):
    """What a request id says."""

    group: int
    sample: int
    attempt: int

    @classmethod
    def of(cls, rid: str) -> Self:
        found = re.search(r"/g(\d+)/s(\d+)/a(\d+)$", rid)
        assert found is not None, rid
        return cls(*map(int, found.groups()))

    @property
    def at_first(self) -> Self:
        return self._replace(attempt=1)
