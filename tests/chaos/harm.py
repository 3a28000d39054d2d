"""Ways to hurt one part of a run, and what can be read of it afterwards."""

import itertools
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from temporalio.client import Client

from relax_infer.contracts.recovery import RecoveryResult
from relax_infer.engines import ReplicaDescription, host_processes
from tests.chaos.held import nobody_held_beside_another
from tests.e2e.looking import RunFiles, lease_status, until


@dataclass(frozen=True)
class Wound:
    """What was done to which incarnation, and when."""

    what: str
    incarnation: str
    pids: tuple[int, ...]
    at: float
    """Unix seconds."""


@dataclass(frozen=True)
class Healing:
    """What became of a wound: one row of the table in docs/reliability.md."""

    what: str
    noticed: float
    """Seconds from the wound to the first thing that was done about it."""
    recovered: float
    """Seconds from the wound to a part that answers again."""
    lease: str
    """Changes of the leases between the two."""
    step: str
    """What the step did."""

    def row(self) -> str:
        return (
            f"| {self.what} | {self.noticed:.1f} | {self.recovered:.1f} | {self.lease} |"
            f" {self.step} |"
        )


TABLE: list[Healing] = []
"""Of every test of this process; printed at its end."""


async def describe(run: str, engine: str) -> ReplicaDescription:
    """Where an engine (``rollout.policy.replica-0``) is on its host."""
    import ray

    actor: Any = ray.get_actor(f"engine.{engine}", namespace=f"relax-{run}")
    return await actor.describe.remote()


async def kill(run: str, engine: str, part: str, number: signal.Signals) -> Wound:
    """Signal one ``part`` of an engine: ``scheduler``, ``server`` (its HTTP process) or ``actor``
    (the Ray actor; the server is left alive)."""
    where = await describe(run, engine)
    assert where.incarnation is not None
    os.kill(_pid(where, part), number)
    return Wound(f"{engine} {part} {number.name}", where.incarnation, where.pids, time.time())


def _pid(where: ReplicaDescription, part: str) -> int:
    if part == "actor":
        return where.actor_pid
    if part == "server":
        return where.pids[0]
    for pid in where.pids:
        row = host_processes.process(pid)
        if row is not None and "schedul" in row.command:
            return pid
    raise AssertionError(f"{where.engine_id} has no scheduler among {where.pids}")


async def healed(client: Client, recovery: str, wound: Wound, seconds: float = 90) -> Healing:
    """Wait for a recovery to begin and to end well; nothing of the wounded incarnation is left."""
    handle = client.get_workflow_handle(recovery, result_type=RecoveryResult)
    await until(lambda: _exists(client, recovery), seconds, f"{recovery} to begin")
    result = await handle.result()
    assert result.state == "READMITTED", result.why
    nothing_is_left(wound)
    seen = await handle.describe()
    assert seen.close_time is not None
    run = recovery.partition(".")[0]
    return Healing(
        what=wound.what,
        noticed=seen.start_time.timestamp() - wound.at,
        recovered=seen.close_time.timestamp() - wound.at,
        lease=await lease_since(client, run, wound.at),
        step="waits, asks again for what is missing",
    )


def nothing_is_left(wound: Wound) -> None:
    assert [pid for pid in wound.pids if host_processes.process(pid) is not None] == []


async def lease_since(client: Client, run: str, at: float) -> str:
    """Changes of the leases from a moment on, in words."""
    changes = [t for t in (await lease_status(client, run)).transitions if t.at >= at]
    return ", ".join(f"{t.role} {t.state}" for t in changes) or "unchanged"


async def _exists(client: Client, workflow: str) -> bool:
    query = f"WorkflowId = '{workflow}'"
    return [w async for w in client.list_workflows(query)] != []


def who_answered(files: RunFiles) -> list[tuple[float, float, str]]:
    """(first admitted, last ended, phase) of every phase, from the engines' own request logs."""
    spans: dict[str, list[float]] = {}
    for event in files.requests(f"{files.ref.run}/"):
        _, step, phase, *_ = str(event["rid"]).split("/")
        spans.setdefault(f"{step}/{phase}", []).append(float(event["t"]))
    return sorted((min(times), max(times), phase) for phase, times in spans.items())


def nobody_was_beside_another(files: RunFiles) -> None:
    """The first promise, as the engines' requests show it, and as every holder's own lines do."""
    nobody_held_beside_another(files.folder.parents[1], files.ref.run)
    spans = who_answered(files)
    for (_, ended, before), (began, _, after) in itertools.pairwise(spans):
        assert ended <= began, f"{after} began {ended - began:.3f} s before {before} had ended"
