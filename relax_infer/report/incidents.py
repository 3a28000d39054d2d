"""What went wrong: when it was noticed, how late at most, and how long it took to mend. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.recovery import RecoveryTrace
from relax_infer.contracts.run import PhaseRetry, StepRecord
from relax_infer.machines import RECOVERY, LeaseState, RecoveryState

What = Literal[
    "replica lost", "lease blocked", "phase repeated", "phase failed", "step gave up", "alarm"
]


@dataclass(frozen=True)
class Incident:
    """One thing that went wrong."""

    what: What
    step: int
    who: str
    """Role, replica or phase."""
    cause: str
    noticed: float
    """Unix seconds."""
    known_well: float | None = None
    """Unix seconds: the last sign on record, before it was noticed, that all was well. It broke
    after that."""
    mended: float | None = None
    """Unix seconds; None: not within what is on record."""
    ending: str = ""
    """How it ended, or where it stands."""

    @property
    def to_notice(self) -> float | None:
        """Seconds that may have passed unnoticed, at most."""
        return None if self.known_well is None else self.noticed - self.known_well

    @property
    def to_mend(self) -> float | None:
        """Seconds from the notice until all was well again."""
        return None if self.mended is None else self.mended - self.noticed


def incidents_of(
    steps: Sequence[StepRecord], transitions: Sequence[LeaseTransition]
) -> list[Incident]:
    """Of these steps, in the order of time."""
    found = [
        *_recoveries(steps, transitions),
        *_blocked(steps, transitions),
        *(_retry(step.step, retry) for step in steps for retry in step.retries),
        *_ends(steps),
    ]
    return sorted(found, key=lambda incident: incident.noticed)


def recoveries_of(steps: Sequence[StepRecord]) -> list[RecoveryTrace]:
    """Each once, as it was last told of, oldest first."""
    newest = {trace.workflow: trace for step in steps for trace in step.recoveries}
    return sorted(newest.values(), key=lambda trace: trace.states[0][1])


def step_at(steps: Sequence[StepRecord], when: float) -> int:
    """The newest step that had begun by then."""
    begun = [s.step for s in steps if s.result.phases and s.result.phases[0].started <= when]
    return max(begun, default=steps[0].step)


def _recoveries(
    steps: Sequence[StepRecord], transitions: Sequence[LeaseTransition]
) -> Iterator[Incident]:
    for trace in recoveries_of(steps):
        noticed = trace.states[0][1]
        # Only an ACTIVE lease says that every replica of the role had answered.
        signs = [
            t.at
            for t in transitions
            if t.role == trace.role and t.state == LeaseState.ACTIVE and t.at <= noticed
        ]
        last, entered = trace.states[-1]
        over = last in RECOVERY.terminal
        ending = {
            RecoveryState.READMITTED: "rebuilt and readmitted",
            RecoveryState.ABANDONED: "given up; its GPUs are free",
        }.get(last, f"was {last}")
        if trace.resolved_by:
            ending += f", on the word of {trace.resolved_by}"
        if trace.why:
            ending += f": {trace.why}"
        yield Incident(
            "replica lost",
            step_at(steps, noticed),
            f"{trace.role} {trace.engine_id}",
            trace.cause,
            noticed,
            max(signs, default=None),
            entered if over else None,
            ending,
        )


def _blocked(
    steps: Sequence[StepRecord], transitions: Sequence[LeaseTransition]
) -> Iterator[Incident]:
    for k, t in enumerate(transitions):
        if t.state != LeaseState.BLOCKED:
            continue
        before = [e for e in transitions[:k] if e.role == t.role]
        if before and before[-1].state == LeaseState.BLOCKED:
            continue
        after = [e for e in transitions[k + 1 :] if e.role == t.role]
        left = next((e for e in after if e.state != LeaseState.BLOCKED), None)
        yield Incident(
            "lease blocked",
            step_at(steps, t.at),
            t.role,
            t.event.replace("_", " ").lower(),
            t.at,
            before[-1].at if before else None,
            left.at if left else None,
            f"{left.event.replace('_', ' ').lower()}: {left.state}" if left else "was BLOCKED",
        )


def _retry(step: int, retry: PhaseRetry) -> Incident:
    return Incident(
        "phase failed" if retry.recovered is None else "phase repeated",
        step,
        f"{retry.what}, attempt {retry.attempt}",
        retry.error,
        retry.failed,
        retry.began,
        retry.recovered,
        "a later attempt succeeded" if retry.recovered else "no later attempt succeeded",
    )


def _ends(steps: Sequence[StepRecord]) -> Iterator[Incident]:
    for step in steps:
        phases = step.result.phases
        ended = phases[-1].started + phases[-1].seconds if phases else 0.0
        for each in step.earlier:
            mended = None if step.error else ended
            ending = "tried again" + ("" if step.error else ", and done")
            yield Incident(
                "step gave up",
                step.step,
                "an attempt",
                each.error,
                each.ended,
                None,
                mended,
                ending,
            )
        if step.error:
            yield Incident("step gave up", step.step, "step", step.error, ended)
        for alarm in step.result.alarms:
            yield Incident("alarm", step.step, "trainer", alarm, ended)
