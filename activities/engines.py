"""Lifecycle of engine groups, and the evidence of releases."""

import asyncio

from temporalio import activity

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    OffloadCheck,
    OffloadConfirmation,
    WatchReport,
    WatchRequest,
)
from relax_infer.engines import EngineGroup, check_evidence, read_evidence
from relax_infer.telemetry.traces import traceparent


@activity.defn
async def onload_engines(operation: EngineOperation) -> GroupReport:
    """Launch or wake every replica, with the asked weights, and open its admission."""
    return await EngineGroup(operation.group).onload(_traced(operation))


@activity.defn
async def offload_engines(operation: EngineOperation) -> GroupReport:
    """Close admission, drain, release; the report refers to the evidence."""
    return await EngineGroup(operation.group).offload(_traced(operation))


@activity.defn
async def launch_engines(operation: EngineOperation) -> GroupReport:
    """Start servers with their gates closed and check their weights."""
    return await EngineGroup(operation.group).launch(_traced(operation))


@activity.defn
async def load_engine_weights(operation: EngineOperation) -> GroupReport:
    """Bring weights to engines that are awake and read them back."""
    return await EngineGroup(operation.group).load_weights(_traced(operation))


@activity.defn
async def watch_engines(request: WatchRequest) -> WatchReport:
    """Return when a replica is lost; cancelled when its group is operated on."""
    return await EngineGroup(request.group).watch(request.incarnations)


@activity.defn
async def forget_engines(operation: EngineOperation) -> GroupReport:
    """Take a person's word that failed replicas are gone; refused where a process shows."""
    return await EngineGroup(operation.group).forget(operation)


@activity.defn
async def stop_engines(operation: EngineOperation) -> GroupReport:
    """End every process of the group and prove it."""
    return await EngineGroup(operation.group).stop(operation)


@activity.defn
async def probe_engines(group: EngineGroupSpec) -> GroupReport:
    """Look, and change nothing."""
    return await EngineGroup(group).probe()


def _traced(operation: EngineOperation) -> EngineOperation:
    """What the engines' actors do for it is told below this activity."""
    return operation.model_copy(update={"traceparent": traceparent()})


async def _confirm(check: OffloadCheck) -> OffloadConfirmation:
    staged = await asyncio.gather(*(asyncio.to_thread(read_evidence, e) for e in check.evidence))
    return check_evidence(check, [item for evidence in staged for item in evidence])


@activity.defn
async def confirm_rollout_offload(check: OffloadCheck) -> OffloadConfirmation:
    """Read the evidence that every policy engine released its GPUs, and check it."""
    return await _confirm(check)


@activity.defn
async def confirm_genrm_offload(check: OffloadCheck) -> OffloadConfirmation:
    """Read the evidence that every GenRM engine released its GPUs, and check it."""
    return await _confirm(check)


@activity.defn
async def confirm_teacher_offload(check: OffloadCheck) -> OffloadConfirmation:
    """Read the evidence that every Teacher engine released its GPUs, and check it."""
    return await _confirm(check)


@activity.defn
async def confirm_trainer_offload(check: OffloadCheck) -> OffloadConfirmation:
    """Read the evidence that every trainer rank released its GPU, and check it."""
    return await _confirm(check)


ACTIVITIES = (
    launch_engines,
    load_engine_weights,
    onload_engines,
    offload_engines,
    watch_engines,
    forget_engines,
    stop_engines,
    probe_engines,
    confirm_rollout_offload,
    confirm_genrm_offload,
    confirm_teacher_offload,
    confirm_trainer_offload,
)
