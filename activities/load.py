"""How busy the engines of a model are."""

import asyncio
from time import monotonic as _clock

from temporalio import activity

from activities._run_files import store_of
from relax_infer.contracts.autoscale import LoadAsk, LoadReport
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import StepRecord
from relax_infer.engines import EngineGroup
from relax_infer.machines import StepPhase
from relax_infer.samples import layout

_PAUSE = 1.0
"""Seconds between two questions of one look."""
_PHASES = {
    "rollout": StepPhase.GENERATING,
    "genrm": StepPhase.GENRM_SCORING,
    "teacher": StepPhase.TEACHER_SCORING,
}


@activity.defn
async def look_at_load(ask: LoadAsk) -> LoadReport:
    """Requests in flight in every engine of the model, as a mean over the look, and what the
    role's phase of the last batch took. A replica that does not answer is left out."""
    engines = EngineGroup(ask.group)
    deadline = _clock() + ask.seconds
    seen: list[int] = []
    while True:
        counts = await engines.in_flight()
        seen.append(sum(counts))
        if (left := deadline - _clock()) <= 0:
            break
        await asyncio.sleep(min(_PAUSE, left))
    step, seconds = await asyncio.to_thread(last_batch, ask.run, _PHASES[ask.group.role])
    return LoadReport(
        in_flight=sum(seen) / len(seen), replicas=len(counts), step=step, batch_seconds=seconds
    )


def last_batch(run: RunRef, phase: StepPhase) -> tuple[int | None, float | None]:
    """The newest step whose record has the phase, and its seconds; (None, None): no step has."""
    store = store_of(run)
    for step in reversed(store.steps()):
        if store.exists(name := layout.record(step)):
            record = StepRecord.model_validate(store.read_json(name))
            took = [each.seconds for each in record.result.phases if each.phase is phase]
            if took:
                return step, took[-1]
    return None, None


ACTIVITIES = (look_at_load,)
