"""How a role's replicas and its autoscale policies stand, and their switch."""

import time
from pathlib import Path
from typing import Any

from temporalio.client import (
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.cli._errors import CommandError, UnansweredError
from relax_infer.cli._runs import Runs, runs_of, words_of
from relax_infer.cli._scaling import told
from relax_infer.cli._server import connected
from relax_infer.contracts.autoscale import AutoscaleNote, AutoscaleStatus, AutoscaleSwitch
from relax_infer.contracts.base import Message
from relax_infer.contracts.counted import counted
from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.scale import ScaleStatus
from relax_infer.machines import ReplicaState

_SHOWN = 5
"""Ended operations, and decisions that led to one."""


class RoleScaling(Message):
    """What is shown of a role."""

    run: str
    role: str
    groups: tuple[GroupSnapshot, ...]
    operations: tuple[ScaleStatus, ...]
    """At work, and the last that ended, oldest first."""
    policies: tuple[AutoscaleStatus, ...]
    externals: tuple[ExternalEngine, ...]
    """Engines of others."""


async def look(home: Path, run: str, role: str) -> RoleScaling:
    """Ask the role."""
    async with connected(home) as server:
        handle = await _role(runs_of(server), server.client, run, role)
        try:
            groups = await handle.query("replicas", result_type=list[GroupSnapshot])
            operations = await handle.query("scaling", result_type=list[ScaleStatus])
            policies = await handle.query("autoscaling", result_type=list[AutoscaleStatus])
            externals = await handle.query("externals", result_type=list[ExternalEngine])
        except (RPCError, WorkflowQueryFailedError) as error:
            raise _unheard(run, role, error) from error
    return RoleScaling(
        run=run,
        role=role,
        groups=tuple(groups),
        operations=tuple(operations),
        policies=tuple(policies),
        externals=tuple(externals),
    )


async def switch(home: Path, run: str, role: str, wanted: AutoscaleSwitch) -> None:
    """Switch the role's policies, or that of one model."""
    async with connected(home) as server, (runs := runs_of(server)).notice():
        handle = await _role(runs, server.client, run, role)
        try:
            await handle.execute_update("autoscale", wanted)
        except WorkflowUpdateFailedError as error:
            raise CommandError(f"{run}, {role}: {words_of(error.cause)}") from error
        except (RPCError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
            raise _unheard(run, role, error) from error


async def _role(runs: Runs, client: Any, run: str, role: str) -> WorkflowHandle[Any, Any]:
    await runs.status(run, patience=30.0)  # says so where nobody is at work
    return client.get_workflow_handle(f"{run}.{role}")


def _unheard(run: str, role: str, error: Exception) -> Exception:
    if isinstance(error, RPCError) and error.status is RPCStatusCode.NOT_FOUND:
        return CommandError(
            f"Run {run} has no role {role} at work.", cure=f"`relax-infer status {run}`"
        )
    return UnansweredError(f"{run}, {role} did not answer: {error}", cure="Ask again.")


def shown(scaling: RoleScaling) -> list[str]:
    """Lines for a person."""
    lines: list[str] = []
    for group in scaling.groups:
        there = [r for r in group.replicas if r.replica not in group.leaving]
        ready = sum(r.state is ReplicaState.READY for r in there)
        lines.append(
            f"{scaling.role} {group.model}  {group.state}  {counted(len(there), 'replica')},"
            f" {ready} answer"
        )
    lines += [
        f"{scaling.role} {engine.model}  {engine.url}  {engine.state}  {engine.why or ''}".rstrip()
        for engine in scaling.externals
    ]
    for policy in scaling.policies:
        lines += _policy(policy)
    if not scaling.policies:
        lines.append("No autoscale policy: replicas come and go when somebody asks.")
    working = [each for each in scaling.operations if not each.ended]
    ended = [each for each in scaling.operations if each.ended][-_SHOWN:]
    for each in (*ended, *working):
        lines += told(each)[: None if not each.ended else 1]
    return lines


def _policy(status: AutoscaleStatus) -> list[str]:
    policy = status.policy
    head = f"autoscale {status.model}  {policy.min_replicas} to {policy.max_replicas} replicas"
    if status.off is not None:
        return [f"{head}  off: {status.off}"]
    last = f"  {_note(status.last)}" if status.last is not None else "  no look yet"
    return [f"{head}{last}", *(f"  {_note(each)}" for each in status.decisions[-_SHOWN:])]


def _note(note: AutoscaleNote) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(note.at))
    then = f" -> {note.outcome or 'at work'}" if note.operation_id else ""
    return f"{at}  {note.target} wanted: {note.reason}{then}"
