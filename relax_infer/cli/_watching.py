"""A whole look at a run: replicas, the phases of its step, what it did before."""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from relax_infer.cli._glance import Glance
from relax_infer.cli._history import Told, read
from relax_infer.cli._runs import Runs, at_work, heed_interrupt
from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.run import RunStatus, StepResult
from relax_infer.machines import StepPhase

EARLIER = 5
"""Steps whose times say what to expect."""
_FRESH = 2.0
"""Seconds after which replicas and load are asked for again."""
_METRICS_TIMEOUT = 1.0
_IN_FLIGHT = re.compile(r'relax_gateway_requests_in_flight\{role="(\w+)"\} ([\d.e+]+)')


class Watcher:
    """Looks at one run again and again; what cannot change is asked for once, and what costs a
    worker something not at every look.

    Args:
        detailed: also replicas, phases, load and earlier steps.
    """

    def __init__(self, runs: Runs, run: str, *, detailed: bool = True) -> None:
        self._runs, self._run, self._detailed = runs, run, detailed
        self._engines: tuple[float, tuple[GroupSnapshot, ...], dict[str, int]] | None = None
        self._results: dict[int, StepResult | None] = {}
        self._told: tuple[tuple[int, StepPhase], Told] | None = None

    async def look(self, *, patience: float = 0.0) -> Glance:
        """Everything that somebody answers for; errors as of :meth:`Runs.glance`."""
        glance = await self._runs.glance(self._run, patience=patience)
        if glance.over:
            return replace(glance, last=_last(await self._earlier(glance.run)))
        if glance.step is not None:
            step_told = await self._runs.told(f"{self._run}.step-{at_work(glance.run)}")
            glance = replace(glance, told=step_told or glance.told)
        if not self._detailed:
            return glance
        (groups, load), told, results = await asyncio.gather(
            self._replicas(glance.run), self._history(glance), self._earlier(glance.run)
        )
        return replace(
            glance,
            groups=groups,
            phases=told.phases(time.time()) if told is not None else (),
            expected=expected(results),
            load=load,
            last=_last(results),
        )

    async def _replicas(self, run: RunStatus) -> tuple[tuple[GroupSnapshot, ...], dict[str, int]]:
        """Engine groups and their load, a few seconds old at most."""
        now = time.monotonic()
        if self._engines is None or now - self._engines[0] > _FRESH:
            groups, load = await asyncio.gather(self._groups(run), _load(run.gateway_url))
            self._engines = (now, groups, load)
        return self._engines[1:]

    async def _groups(self, run: RunStatus) -> tuple[GroupSnapshot, ...]:
        asked = (
            self._runs.query(workflow, "replicas", list[GroupSnapshot])
            for workflow in run.roles.values()
        )
        return tuple(group for found in await asyncio.gather(*asked) for group in found or ())

    async def _history(self, glance: Glance) -> Told | None:
        """Read again only when the step is in another phase."""
        if glance.step is None:
            return None
        at = (glance.step.step, glance.step.phase)
        if self._told is None or self._told[0] != at:
            told = await step_history(self._runs, self._run, glance.step.step)
            if told is None:
                return None
            self._told = (at, told)
        return self._told[1]

    async def _earlier(self, run: RunStatus) -> list[StepResult]:
        """Results of the last steps that trained, oldest first."""
        numbers = [p.step for p in run.progress if p.step > 0][-EARLIER:]
        new = [number for number in numbers if number not in self._results]
        found = await asyncio.gather(*(step_result(self._runs, self._run, n) for n in new))
        self._results.update(zip(new, found, strict=True))
        known = (self._results[number] for number in numbers)
        return [result for result in known if result is not None]


def expected(results: list[StepResult]) -> Mapping[str, float]:
    """Seconds of each phase, the median of earlier steps."""
    times: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for phase in result.phases:
            times[phase.phase].append(phase.seconds)
    return {phase: median(seconds) for phase, seconds in times.items()}


async def step_history(runs: Runs, run: str, step: int) -> Told | None:
    """The history of a step; None if Temporal keeps none."""
    handle = runs.client.get_workflow_handle(f"{run}.step-{step}")
    try:
        return read((await handle.fetch_history()).events)
    except RPCError:
        heed_interrupt()
        return None


async def step_result(runs: Runs, run: str, step: int) -> StepResult | None:
    """What a finished step left; None if it failed, goes on, or is not kept any more."""
    handle = runs.client.get_workflow_handle(f"{run}.step-{step}", result_type=StepResult)
    try:
        async with asyncio.timeout(5):
            return await handle.result(follow_runs=False)
    except (WorkflowFailureError, RPCError, TimeoutError):
        heed_interrupt()
        return None


def _last(results: list[StepResult]) -> StepResult | None:
    return results[-1] if results else None


async def _load(gateway: str | None) -> dict[str, int]:
    """Requests in flight, as the run's gateway counts them; empty where it cannot be reached. The
    policy's go to its router, so of them it knows nothing."""
    if gateway is None:
        return {}
    return await asyncio.to_thread(_scrape, gateway)


def _scrape(gateway: str) -> dict[str, int]:
    from ssl import SSLContext
    from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

    from relax_infer.security import gateway_headers, gateway_ssl

    trusted = gateway_ssl()
    https = HTTPSHandler(context=trusted if isinstance(trusted, SSLContext) else None)
    opener = build_opener(ProxyHandler({}), https)
    asked = Request(f"{gateway.rstrip('/')}/metrics", headers=gateway_headers())
    try:
        with opener.open(asked, timeout=_METRICS_TIMEOUT) as answer:
            text = answer.read().decode(errors="replace")
    except (OSError, ValueError):
        return {}
    found = {role: int(float(number)) for role, number in _IN_FLIGHT.findall(text)}
    found.pop("rollout", None)
    return found
