"""Why a step is where it is, in words. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from relax_infer.cli._errors import Code
from relax_infer.cli._glance import Glance
from relax_infer.cli._history import Done, Told, clock
from relax_infer.cli._pending import Activity, Pending
from relax_infer.cli._view import number
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import Evaluation, PhaseTime, StepRecord, StepResult
from relax_infer.machines import RunState, StepPhase

_SLOW = 2.0
"""Times its expected time after which a phase is called slow."""
_SILENT = 10.0
"""Seconds since its last heartbeat after which an activity is called silent."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one step. Parts that nobody answers for are None."""

    run: str
    step: int
    now: float
    glance: Glance | None = None
    told: Told | None = None
    pending: Pending | None = None
    result: StepResult | None = None
    record: StepRecord | None = None
    earlier: tuple[str, ...] = ()
    """Why attempts before this one gave up, the first first."""
    expected: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def phases(self) -> tuple[PhaseTime, ...]:
        if self.told is not None and self.told.entered:
            return self.told.phases(self.now)
        if self.result is not None:
            return self.result.phases
        return self.record.result.phases if self.record is not None else ()

    @property
    def error(self) -> str | None:
        if self.told is not None and self.told.error:
            return self.told.error
        return self.record.error if self.record is not None else None

    @property
    def cut_off(self) -> bool:
        """Its workflow was ended from outside."""
        return self.told is not None and self.told.closed is not None

    @property
    def at_work(self) -> bool:
        step = self.glance.step if self.glance is not None else None
        open_history = self.told is not None and self.told.ended is None
        if self.cut_off:
            return False
        return open_history or (step is not None and step.step == self.step and not self.error)

    @property
    def phase(self) -> StepPhase | None:
        """Where it is, or how it ended; None if it has not begun."""
        if self.told is not None and self.told.entered:
            return self.told.entered[-1][0]
        if self.record is not None:
            return self.record.outcome
        return StepPhase.DONE if self.result is not None else None


@dataclass(frozen=True)
class Explanation:
    """The answer, line by line."""

    headline: str
    phases: tuple[PhaseTime, ...]
    notes: tuple[str, ...]
    """What it is doing, what went wrong on the way, what it waits for."""
    cures: tuple[str, ...]
    """What a person can do; none if nothing has to be done."""
    code: Code

    def document(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "phases": [p.model_dump(mode="json") for p in self.phases],
            "notes": list(self.notes),
            "cures": list(self.cures),
        }


def explain(known: Evidence) -> Explanation:
    """From everything that is known of the step."""
    return Explanation(
        headline=_headline(known),
        phases=known.phases,
        notes=tuple(_notes(known)),
        cures=tuple(_cures(known)),
        code=_code(known),
    )


def phase_text(phase: PhaseTime, expected: Mapping[str, float], *, at_work: bool) -> str:
    """One phase with its time, and whether that is unusual."""
    known = expected.get(phase.phase)
    text = f"{phase.phase:<18} {phase.seconds:8.1f} s{' so far' if at_work else ''}"
    if known is not None:
        text += f", expected {known:.1f} s"
        if phase.seconds > max(_SLOW * known, known + 1):
            text += ": slow"
    return text


def _headline(known: Evidence) -> str:
    name = f"Step {known.step} of {known.run}"
    if known.phase is None:
        return f"{name} has not begun{_why_not_begun(known)}."
    if known.told is not None and known.told.closed is not None:
        return f"{name} was ended from outside ({known.told.closed}) in {known.phase}."
    if known.at_work:
        step = known.glance.step if known.glance is not None else None
        doing = f": it {step.doing}" if step is not None and step.step == known.step else ""
        return f"{name} is in {known.phase}{doing}."
    total = sum(phase.seconds for phase in known.phases)
    if known.error or known.phase is StepPhase.FAILED:
        last = known.phases[-1].phase if known.phases else known.phase
        return f"{name} gave up in {last} after {total:.1f} s: {known.error or 'no cause is kept'}."
    return f"{name} is done; it took {total:.1f} s."


def _why_not_begun(known: Evidence) -> str:
    if known.glance is None:
        return ", or Temporal has forgotten it"
    run = known.glance.run
    if known.glance.over:
        return f": the run is {run.state}, its last step was {run.step}"
    if known.step > run.target > 0:
        return f": the run ends with step {run.target}"
    last = f"its last finished step is {run.step}" if run.step else "no step of it is finished yet"
    return f": the run is {run.state} ({run.doing}), {last}"


def _notes(known: Evidence) -> Iterator[str]:
    if known.glance is None and known.told is not None:
        yield "No worker answers, or it is busy: this is what Temporal itself knows."
    for attempt, why in enumerate(known.earlier, 1):
        yield f"Attempt {attempt} gave up: {why}"
    if known.told is not None:
        yield f"It began at {clock(known.told.began)}."
        yield from (_failed(each) for each in known.told.activities if each.words)
        yield from (_failed(each) for each in known.told.children if each.words)
    if known.at_work:
        yield from _work(known)
    else:
        yield from _left(known)


def _work(known: Evidence) -> Iterator[str]:
    for activity in known.pending.activities if known.pending is not None else ():
        yield _at_work(activity, known)
    for child in known.pending.children if known.pending is not None else ():
        yield f"Waits for the workflow {child}."
    for whom, what, since in known.told.asked.values() if known.told is not None else ():
        waited = known.now - since
        yield f"Waits since {waited:.0f} s for {whom} to answer `{what}`."
    if known.glance is not None and known.glance.lease is not None:
        yield from _lease(known.glance.lease)
    if known.glance is not None:
        yield from _engines(known.glance)


def _engines(glance: Glance) -> Iterator[str]:
    """What is wrong with them; a reason is said once, though a lease, a group and a replica may all
    have it."""
    lease = glance.lease
    said = " ".join(filter(None, (r.reason for r in lease.roles.values()))) if lease else ""
    for group in glance.groups:
        for replica in group.replicas:
            if replica.error:
                why = "as said above" if replica.error in said else replica.error.rstrip(".")
                yield f"{group.role} {replica.engine_id} is {replica.state}: {why}."
                said += replica.error
        if group.stuck and not all(each in said for each in group.stuck.split("; ")):
            yield f"{group.role} {group.model}: {group.stuck}"


def _at_work(activity: Activity, known: Evidence) -> str:
    text = f"At work: {activity.name}"
    done = _same(known.told, activity.name)
    if done is not None and done.summary != activity.name:
        text += f" ({done.summary})"
    if activity.attempt > 1:
        text += f", attempt {activity.attempt}"
    if activity.started is None:
        text += "; no worker has taken it yet"
    else:
        text += f", for {_ago(activity.started, known.now):.0f} s on {activity.worker}"
    if activity.heard is not None and _ago(activity.heard, known.now) > _SILENT:
        text += f"; nothing heard of it for {_ago(activity.heard, known.now):.0f} s"
    if activity.told:
        text += f"; it says: {activity.told}"
    if activity.failure:
        text += f". Its attempt before failed: {activity.failure}"
    return f"{text.rstrip('.')}."


def _lease(lease: LeaseStatus) -> Iterator[str]:
    blocked = {role: held for role, held in lease.roles.items() if held.state == "BLOCKED"}
    if not blocked:
        holder = lease.holder
        who = f"{holder}, which is {lease.roles[holder].state}" if holder else "nobody"
        yield f"The GPUs of pool {lease.pool} are with {who}."
    for role, held in blocked.items():
        why = (held.reason or "").rstrip(".")
        yield f"The lease of {role} is BLOCKED: {why}. Nobody else may have its GPUs."


def _left(known: Evidence) -> Iterator[str]:
    result = known.result or (known.record.result if known.record is not None else None)
    if known.phases and known.phase is StepPhase.DONE:
        longest = max(known.phases, key=lambda phase: phase.seconds)
        yield f"Its longest phase was {longest.phase}, {longest.seconds:.1f} s."
    if result is None:
        return
    if result.batch is not None:
        batch = result.batch
        yield (
            f"Its batch: {batch.samples} samples, reward {number(batch.reward_mean)}, teacher KL"
            f" {number(batch.teacher_kl)}, {batch.dropped_groups} groups dropped."
        )
        yield from (f"Dropped: {count} for {why}." for why, count in batch.drop_reasons.items())
    if result.training is not None:
        yield f"The update: loss {number(result.training.loss)}, weights {result.weights.version}."
    yield from (f"Warning: {alarm}." for alarm in result.alarms)
    if result.evaluation is not None:
        yield from _evaluated(result.evaluation)


def _evaluated(evaluation: Evaluation) -> Iterator[str]:
    weights = f"with weights {evaluation.weight_version}"
    if not evaluation.sets:
        yield f"Accuracy {number(evaluation.accuracy)} on the held-out problems, {weights}."
    for each in evaluation.sets:
        passed = "".join(f", pass@{k} {number(value)}" for k, value in each.pass_at.items())
        answers = f"{each.problems} problems" + (
            f", {each.samples} answers each" if each.samples > 1 else ""
        )
        refused = f"; {each.unanswered} answers were refused" if each.unanswered else ""
        yield (
            f"Accuracy {number(each.accuracy)}{passed} on {each.name} ({answers}), {weights}"
            f"{refused}."
        )


def _cures(known: Evidence) -> Iterator[str]:
    glance = known.glance
    if glance is None and known.told is not None and known.told.ended is None:
        yield "If there is no worker: relax-infer up, or relax-infer worker"
    if glance is None or glance.over:
        return
    run = known.run
    lease = glance.lease
    blocked = lease is not None and any(r.state == "BLOCKED" for r in lease.roles.values())
    if blocked and glance.run.state is RunState.BLOCKED:
        yield (
            f"When you saw that it is gone: relax-infer resolve {run} --who NAME --why TEXT"
            " --confirm-released"
        )
    elif blocked:
        yield "The lease looks again by itself; what its reason asks for may be done at once."
    elif glance.run.state is RunState.BLOCKED and _gave_up(known):
        yield f"Again: relax-infer step retry {run} {known.step} --who NAME --why TEXT"
        yield f"To stop: relax-infer resolve {run} --who NAME --why TEXT --stop"
    elif glance.run.state is RunState.PAUSED and known.phase is None:
        yield f"To go on: relax-infer resume {run}"
    if known.at_work or known.error:
        yield f"Its logs: relax-infer logs {run} --step {known.step}"


def _gave_up(known: Evidence) -> bool:
    return known.phase is StepPhase.FAILED or known.cut_off


def _code(known: Evidence) -> Code:
    glance = known.glance
    if glance is not None and glance.run.state is RunState.BLOCKED and known.phase is not None:
        waits = known.at_work or _gave_up(known)
        return Code.BLOCKED if waits else Code.DONE
    return Code.FAILED if known.phase is StepPhase.FAILED else Code.DONE


def _failed(done: Done) -> str:
    when = clock(done.ended) if done.ended else clock(done.at)
    return f"At {when} {done.summary} {done.outcome}: {done.words.rstrip('.')}."


def _same(told: Told | None, name: str) -> Done | None:
    found = [each for each in told.activities if each.name == name] if told is not None else []
    return found[-1] if found else None


def _ago(then: datetime, now: float) -> float:
    return max((datetime.fromtimestamp(now, UTC) - then).total_seconds(), 0.0)
