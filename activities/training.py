"""The trainer group."""

import asyncio

from temporalio import activity

from activities._run_files import store_of
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.training import (
    TrainerOperation,
    TrainerReport,
    TrainRequest,
    TrainResult,
)
from relax_infer.telemetry.traces import traceparent
from relax_infer.training import TrainerGroup


@activity.defn
async def onload_trainer(operation: TrainerOperation) -> RoleResult:
    """The trainer is resident; the first time it is started, from its latest checkpoint if any."""
    group = TrainerGroup(operation.trainer)
    await group.start()
    return await _result(operation, await group.onload(operation))


@activity.defn
async def offload_trainer(operation: TrainerOperation) -> RoleResult:
    """The trainer let go of its GPUs; the result refers to the evidence."""
    return await _result(operation, await TrainerGroup(operation.trainer).offload(operation))


@activity.defn
async def stop_trainer(operation: TrainerOperation) -> RoleResult:
    """The trainer's processes are gone."""
    return await _result(operation, await TrainerGroup(operation.trainer).stop(operation))


@activity.defn
async def probe_trainer(operation: TrainerOperation) -> RoleResult:
    """Where the trainer stands under this token. What is loaded stays; one that holds nothing says
    so with evidence, and nothing is loaded under the token any more."""
    report = await TrainerGroup(operation.trainer).settle(operation)
    status = report.status
    known = status.fence == operation.fence and status.doubt is None
    if known and (status.resident or report.evidence):
        return await _result(operation, report)
    return RoleResult(state="BLOCKED", why=status.doubt or "it is at work, or under another grant")


@activity.defn
async def forget_trainer(operation: TrainerOperation) -> RoleResult:
    """Take a person's word that what cannot be asked of the trainer is gone; refused where an
    earlier process of it shows. What can be asked lets go: the evidence is of these ranks, and the
    reason names the others."""
    report = await TrainerGroup(operation.trainer).forget(operation)
    if report is None:
        return RoleResult(state="SLEEPING", why="it could not be reached")
    result = await _result(operation, report)
    if not report.unreached:
        return result
    ranks = ", ".join(str(rank) for rank in report.unreached)
    return result.model_copy(update={"why": f"of its ranks these could not be reached: {ranks}"})


@activity.defn
async def train_step(request: TrainRequest) -> TrainResult:
    """One update from a committed partition, once: the ledger answers a repeat."""
    traced = request.model_copy(update={"traceparent": traceparent()})
    return await TrainerGroup(request.trainer).train(traced)


async def _result(operation: TrainerOperation, report: TrainerReport) -> RoleResult:
    asked = (n for n in range(operation.trainer.ranks) if n not in report.unreached)
    holders = tuple(f"trainer/rank-{rank}" for rank in asked)
    state = "READY" if report.status.resident else "SLEEPING"
    if not report.evidence:
        return RoleResult(holders=holders, state=state)
    staged = await asyncio.to_thread(
        store_of(operation.trainer.run).write_json,
        f"engines/evidence/{operation.operation_id}.json",
        [item.model_dump(mode="json") for item in report.evidence],
    )
    return RoleResult(holders=holders, evidence=(staged,), state=state)


ACTIVITIES = (
    onload_trainer,
    offload_trainer,
    stop_trainer,
    probe_trainer,
    forget_trainer,
    train_step,
)
