"""Lifecycle of engine groups, and the evidence of releases."""

import asyncio

from temporalio import activity

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    OffloadCheck,
    OffloadConfirmation,
)
from relax_infer.engines import EngineGroup, check_evidence, read_evidence


@activity.defn
async def onload_engines(operation: EngineOperation) -> GroupReport:
    """Launch or wake every replica, with the asked weights, and open its admission."""
    return await EngineGroup(operation.group).onload(operation)


@activity.defn
async def offload_engines(operation: EngineOperation) -> GroupReport:
    """Close admission, drain, release; the report refers to the evidence."""
    return await EngineGroup(operation.group).offload(operation)


@activity.defn
async def stop_engines(operation: EngineOperation) -> GroupReport:
    """End every process of the group and prove it."""
    return await EngineGroup(operation.group).stop(operation)


@activity.defn
async def probe_engines(group: EngineGroupSpec) -> GroupReport:
    """Look, and change nothing."""
    return await EngineGroup(group).probe()


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
    onload_engines,
    offload_engines,
    stop_engines,
    probe_engines,
    confirm_rollout_offload,
    confirm_genrm_offload,
    confirm_teacher_offload,
    confirm_trainer_offload,
)
