"""Every level of an engine is killed, at rest and under load, in one run on the real parts.

A step for each wound: the step goes on, the batch is whole, the replica is rebuilt after proof, no
process of the dead incarnation is left, and no two roles ever answered at once.
"""

import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from relax_infer.machines import RunState, StepPhase
from tests.chaos.harm import (
    TABLE,
    Healing,
    Wound,
    describe,
    healed,
    kill,
    lease_since,
    nobody_was_beside_another,
    nothing_is_left,
)
from tests.e2e.looking import (
    Handle,
    RunFiles,
    finish,
    lease_status,
    start,
    step_status,
    until,
)
from workers.local import Stack

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

POLICY, JUDGE = "rollout.policy.replica-{}", "genrm.judge.replica-{}"
OVERRIDES = {
    "evaluation.every": 0,
    "distillation": None,
    # Few at once, so that a phase lasts long enough to be hit in its middle.
    "rollout.max_concurrency": 4,
    "genrm.max_concurrency": 4,
    "rollout.engine.health_timeout": 12,
}
UNDER_LOAD = [
    ("generated", POLICY.format(0), "scheduler", signal.SIGKILL),
    ("generated", POLICY.format(1), "server", signal.SIGKILL),
    ("generated", POLICY.format(0), "actor", signal.SIGKILL),
    ("judged", JUDGE.format(0), "scheduler", signal.SIGKILL),
    ("judged", JUDGE.format(0), "server", signal.SIGKILL),
    ("judged", JUDGE.format(0), "actor", signal.SIGKILL),
    ("generated", POLICY.format(1), "scheduler", signal.SIGSTOP),
]


async def test_an_engine_hurt_at_work_is_rebuilt_and_its_step_goes_on(
    stack: Stack, client: Client, ray: None
):
    """pains 6, 7, 20, 26: scheduler, server, Ray actor and a scheduler that stands still."""
    handle = await start(client, steps=len(UNDER_LOAD), overrides=OVERRIDES)
    files = RunFiles(stack.home, handle.id)
    made: dict[str, int] = {}
    recoveries: set[str] = set()
    for step, (phase, engine, part, number) in enumerate(UNDER_LOAD, start=1):
        await until(lambda s=step, p=phase: under_way(files, s, p), 400, f"step {step}'s {phase}")
        wound = await kill(handle.id, engine, part, number)
        group = engine.rpartition(".replica")[0]
        made[group] = made.get(group, 0) + 1
        recovery = f"{handle.id}.{engine}.recovery-{made[group]}"
        recoveries.add(recovery)
        healing = await healed(client, recovery, wound)
        TABLE.append(replace(healing, what=f"{wound.what}, at work"))
        assert "BLOCKED" not in healing.lease
    done = await finish(handle)
    assert done.state is RunState.DONE
    whole(files, len(UNDER_LOAD))
    nobody_was_beside_another(files)
    records = [files.record(step) for step in range(1, len(UNDER_LOAD) + 1)]
    assert {trace.workflow for each in records for trace in each.recoveries} == recoveries


def under_way(files: RunFiles, step: int, phase: str) -> bool:
    return 4 <= len(files.shards(step, phase)) < 26


def whole(files: RunFiles, steps: int) -> None:
    """Every step trained once, on a batch that nothing is missing from."""
    assert [e.result.step for e in files.ledger().entries] == list(range(1, steps + 1))
    for step in range(1, steps + 1):
        record = files.record(step)
        assert record.outcome is StepPhase.DONE
        assert record.result.batch is not None
        assert record.result.batch.groups + record.result.batch.dropped_groups == 32


ASLEEP = [
    (phase, engine, part)
    for part in ("scheduler", "server", "actor")
    for phase, engine in (("generated", JUDGE.format(0)), ("judged", POLICY.format(1)))
]
"""A step has room for two: the judge sleeps while it generates, the policy while it is judged."""


async def test_an_engine_hurt_asleep_is_launched_again_when_it_is_needed(
    stack: Stack, client: Client, ray: None
):
    """Nobody probes a sleeping engine; the next onload finds it, proves it gone and launches."""
    handle = await start(client, steps=3, overrides=OVERRIDES)
    files = RunFiles(stack.home, handle.id)
    for number, (phase, engine, part) in enumerate(ASLEEP):
        step, role = 1 + number // 2, engine.partition(".")[0]
        await until(lambda s=step, p=phase: under_way(files, s, p), 400, f"step {step} {phase}")
        wound = await kill(handle.id, engine, part, signal.SIGKILL)
        await until(rebuilt(handle, engine, wound), 120, f"another engine after {part}")
        nothing_is_left(wound)
        TABLE.append(
            Healing(
                what=f"{wound.what}, asleep",
                noticed=await onload_since(client, handle.id, role, wound.at),
                recovered=time.time() - wound.at,
                lease=await lease_since(client, handle.id, wound.at),
                step="goes on; the next onload launches it anew",
            )
        )
    done = await finish(handle)
    assert done.state is RunState.DONE
    whole(files, 3)
    nobody_was_beside_another(files)


async def onload_since(client: Client, run: str, role: str, at: float) -> float:
    """Seconds from a moment to the role's next grant: nobody looks at who sleeps before."""
    changes = (await lease_status(client, run)).transitions
    granted = (t.at for t in changes if t.role == role and t.at >= at)
    return min(granted, default=at) - at


def rebuilt(handle: Handle, engine: str, wound: Wound) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        try:
            now = await describe(handle.id, engine)
        except Exception:
            return False
        return now.incarnation not in (None, wound.incarnation)

    return look


@pytest.mark.parametrize("doing", ["ROLLOUT_OFFLOADING", "SYNCING_WEIGHTS", "GENRM_SCORING"])
async def test_a_worker_killed_in_a_handover_blocks_nothing(
    stack: Stack, client: Client, ray: None, doing: str
):
    """The engine's actor carries an operation out once, however often it is asked for."""
    handle = await start(client, steps=2, overrides=OVERRIDES)

    async def there() -> bool:
        seen = await step_status(client, handle.id, 1)
        return seen is not None and seen.phase == doing

    async def beyond() -> bool:
        seen = await step_status(client, handle.id, 1)
        return seen is not None and seen.phase != doing

    await worker_dies(stack, client, handle, doing, there, beyond)


async def test_a_worker_killed_while_an_engine_is_launched_costs_no_second_launch(
    stack: Stack, client: Client, ray: None
):
    """An onload that takes long: the judge's engine is stopped and started in every step."""
    restarting = OVERRIDES | {"genrm.engine.offload": "restart"}
    handle = await start(client, steps=2, overrides=restarting)
    files = RunFiles(stack.home, handle.id)

    async def judge_is(*states: str) -> bool:
        try:
            seen = await lease_status(client, handle.id)
        except RPCError:
            return False
        held = seen.roles["genrm"]
        return held.state in states and seen.batch is not None

    async def there() -> bool:
        return len(files.shards(1, "generated")) == 32 and await judge_is("ONLOADING")

    await worker_dies(
        *(stack, client, handle, "the judge's onload"),
        there,
        lambda: judge_is("ACTIVE", "DRAINING", "SLEEPING"),
    )
    launches = list(
        (stack.home / "logs" / handle.id).glob(f"engine.{JUDGE.format(0)}.????????.log")
    )
    assert len(launches) == 3, "one as the run began, one in each step"


async def worker_dies(
    stack: Stack,
    client: Client,
    handle: Handle,
    doing: str,
    there: Callable[[], Awaitable[bool]],
    beyond: Callable[[], Awaitable[bool]],
) -> None:
    """Killed once it is ``there``, started again at once; the run ends whole, unblocked."""
    files = RunFiles(stack.home, handle.id)
    await until(there, 400, doing)
    at = time.time()
    stack.kill("worker", signal.SIGKILL)
    stack.start_worker()
    up = time.time() - at
    await until(beyond, 200, f"the end of {doing}")
    changes = await lease_since(client, handle.id, at)
    assert "BLOCKED" not in changes
    TABLE.append(
        Healing(
            what=f"worker SIGKILL in {doing}",
            noticed=up,
            recovered=time.time() - at,
            lease=changes,
            step="goes on where it was",
        )
    )
    done = await finish(handle)
    assert done.state is RunState.DONE
    whole(files, 2)
    nobody_was_beside_another(files)
