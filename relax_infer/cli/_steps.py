"""The steps of a run: listed, explained, tried again."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_infer.cli._asking import PATIENCE, ask
from relax_infer.cli._errors import CommandError
from relax_infer.cli._explain import Evidence, Explanation, explain
from relax_infer.cli._glance import Glance
from relax_infer.cli._recipes import check_run_id
from relax_infer.cli._reports import store_with
from relax_infer.cli._runs import NobodyAnswersError, Runs, at_work, runs_of
from relax_infer.cli._server import connected
from relax_infer.cli._watching import EARLIER, Watcher, expected, step_history, step_result
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.run import (
    ResolveRun,
    RunProgress,
    RunStatus,
    StepRecord,
    more_than_accuracy,
)
from relax_infer.machines import RunState, StepPhase

_LOOK_PATIENCE = 20.0


@dataclass(frozen=True)
class StepLine:
    """A line of the list of steps."""

    step: int
    phase: str
    progress: RunProgress | None = None
    error: str | None = None

    def document(self) -> dict[str, Any]:
        told = self.progress or RunProgress(step=self.step)
        numbers = told.model_dump(mode="json", exclude={"step", "record"})
        return {"step": self.step, "phase": self.phase, "error": self.error, **numbers}


async def list_steps(home: Path, run: str) -> list[StepLine]:
    """Every step, oldest first: from the run's files where they can be read, and from the run.

    Raises:
        CommandError: there is no such run.
    """
    check_run_id(run)
    lines: dict[int, StepLine] = {}
    try:
        async with connected(home) as server:
            runs = runs_of(server)
            glance = await runs.glance(run, patience=_LOOK_PATIENCE)
    except CommandError:
        store = store_with(home, run)
        if store is None:
            raise
        return sorted(_kept(store, run).values(), key=lambda line: line.step)
    if glance.run.store is not None:
        lines |= _kept(glance.run.store, run)
    for progress in glance.run.progress:
        lines[progress.step] = StepLine(progress.step, StepPhase.DONE, progress)
    if glance.step is not None:
        known = glance.step
        lines[known.step] = StepLine(known.step, known.phase, error=known.error)
    return sorted(lines.values(), key=lambda line: line.step)


async def explain_step(home: Path, run: str, step: int) -> tuple[Explanation, Evidence]:
    """Why a step is where it is.

    Raises:
        CommandError: there is no such run.
    """
    check_run_id(run)
    known: Evidence
    try:
        async with connected(home) as server:
            known = await _evidence(runs_of(server), run, step)
    except CommandError:
        store = store_with(home, run)
        record = record_of(store, run, step) if store is not None else None
        if record is None:
            raise
        known = Evidence(run, step, time.time(), record=record)
    return explain(known), known


async def retry_step(home: Path, run: str, step: int, resolution: ResolveRun) -> RunStatus:
    """Have a step that gave up tried again.

    Raises:
        CommandError: it did not give up, or the run waits for something else.
    """
    check_run_id(run)
    async with connected(home) as server:
        runs = runs_of(server)
        async with runs.notice():
            _check_waits_for(await runs.glance(run, patience=PATIENCE), step)
        return await ask(runs, run, "resolve", resolution)


def _check_waits_for(glance: Glance, step: int) -> None:
    run = glance.run
    if run.state is not RunState.BLOCKED:
        raise CommandError(
            f"Run {run.run} is {run.state}: only a step that gave up can be tried again, and then"
            " the run is BLOCKED",
            cure=f"`relax-infer step explain {run.run} {step}` says where the step is.",
        )
    if glance.lease is not None and any(r.state == "BLOCKED" for r in glance.lease.roles.values()):
        raise CommandError(
            f"Run {run.run} waits for its lease, not for a step: {run.doing}",
            cure=f"`relax-infer status {run.run}` says what to look at.",
        )
    if at_work(run) != step:
        raise CommandError(
            f"Run {run.run} waits at step {at_work(run)}, not at step {step}",
            cure="A step that is done is never trained again.",
        )


async def _evidence(runs: Runs, run: str, step: int) -> Evidence:
    try:
        glance = await Watcher(runs, run).look(patience=_LOOK_PATIENCE)
    except NobodyAnswersError:
        glance = None  # the history needs no worker
    told, pending = await asyncio.gather(
        step_history(runs, run, step), runs.pending(f"{run}.step-{step}")
    )
    # A record of an earlier attempt says nothing of the one at work.
    over = told is None or told.ended is not None
    result = await step_result(runs, run, step) if told is not None and over else None
    store = glance.run.store if glance is not None else None
    written = record_of(store, run, step) if store is not None else None
    before = range(max(step - EARLIER, 1), step) if told is not None else ()
    earlier = await asyncio.gather(*(step_result(runs, run, number) for number in before))
    return Evidence(
        run=run,
        step=step,
        now=time.time(),
        glance=glance,
        told=told,
        pending=pending,
        result=result,
        record=written if over else None,
        earlier=gave_up(written, over=over) if written is not None else (),
        expected=expected([each for each in earlier if each is not None]),
    )


def gave_up(written: StepRecord, *, over: bool) -> tuple[str, ...]:
    """Why attempts before the last one gave up; of a step that is at work the last that wrote its
    record is among them."""
    errors = [each.error for each in written.earlier]
    return (*errors, written.error) if not over and written.error is not None else tuple(errors)


def record_of(store: str, run: str, step: int) -> StepRecord | None:
    """What the step wrote down; None where that cannot be read from here."""
    from fsspec.core import url_to_fs

    try:
        filesystem, root = url_to_fs(store)
        path = f"{root.rstrip('/')}/{run}/steps/{step}/record.json"
        return StepRecord.model_validate_json(filesystem.cat_file(path))
    except (OSError, ValueError, ImportError):
        return None


def _kept(store: str, run: str) -> dict[int, StepLine]:
    """Steps by their records, where the store can be read from here."""
    from relax_infer.report.records import read_records

    try:
        records = read_records(store, run)
    except (PermanentError, OSError, ValueError, ImportError):
        return {}
    return {
        each.step: StepLine(each.step, each.outcome, _progress(each), each.error)
        for each in records.steps
    }


def _progress(record: StepRecord) -> RunProgress:
    batch, training = record.result.batch, record.result.training
    evaluation = record.result.evaluation
    return RunProgress(
        step=record.step,
        reward=batch.reward_mean if batch else None,
        accuracy=evaluation.accuracy if evaluation else None,
        evaluated=more_than_accuracy(evaluation),
        teacher_kl=batch.teacher_kl if batch else None,
        loss=training.loss if training else None,
        logprob_gap=training.logprob_gap if training else None,
        alarms=record.result.alarms,
        seconds=sum(phase.seconds for phase in record.result.phases),
    )
