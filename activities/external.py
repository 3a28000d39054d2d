"""Engines of others: looked at, told to load weights, never launched or stopped."""

from temporalio import activity

from relax_infer.contracts.external import (
    ExternalAsk,
    ExternalLoss,
    ExternalReport,
    ExternalWatch,
)
from relax_infer.contracts.scale import DrainAnswer
from relax_infer.engines import external


@activity.defn
async def check_external(ask: ExternalAsk) -> ExternalReport:
    """Whether it answers, and holds the weights that it should."""
    return await external.check(ask)


@activity.defn
async def drain_external(ask: ExternalAsk) -> DrainAnswer:
    """Wait until one that nobody of ours calls any more works on no request."""
    return DrainAnswer(left=await external.wait_idle(ask.url, ask.timeout))


@activity.defn
async def watch_externals(asked: ExternalWatch) -> ExternalLoss:
    """Return when one of them is lost, or was loaded by somebody else."""
    return ExternalLoss(lost=await external.watch(asked))


ACTIVITIES = (check_external, drain_external, watch_externals)
