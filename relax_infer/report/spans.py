"""When each role had its GPUs, and what part of a step was work. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.run import PhaseTime, StepRecord
from relax_infer.machines import LEASE, LeaseState, StepPhase


class Kind(StrEnum):
    """What a role's grant was spent on."""

    ACTIVE = "active"
    """The role may use its GPUs."""
    MOVING = "moving"
    """It comes up, lets go, or what it does is not known yet."""
    BLOCKED = "blocked"
    """It may still hold its GPUs, and nobody can tell."""


@dataclass(frozen=True)
class Span:
    """From ``start`` to ``stop``, Unix seconds."""

    role: str
    kind: Kind
    start: float
    stop: float
    fence: int
    """Counter of the grant."""

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def transitions_of(steps: Iterable[StepRecord]) -> list[LeaseTransition]:
    """Of all steps in the order of time, each once: steps that overlap tell the same ones."""
    found = {
        (t.at, t.role, t.event, t.fence): t
        for step in steps
        for t in map(LeaseTransition.model_validate, step.transitions)
    }
    return sorted(found.values(), key=lambda t: t.at)


def spans_of(transitions: Sequence[LeaseTransition], until: float) -> list[Span]:
    """Every stretch in which a role held its GPUs; those that go on end at ``until``."""
    spans: list[Span] = []
    for role in dict.fromkeys(t.role for t in transitions):
        mine = [t for t in transitions if t.role == role]
        ends = [*(later.at for _, later in pairwise(mine)), max(until, mine[-1].at)]
        for t, end in zip(mine, ends, strict=True):
            kind = _kind(LeaseState(t.state))
            if kind is not None and end > t.at:
                spans.append(Span(role, kind, t.at, end, t.fence))
    return spans


def _kind(state: LeaseState) -> Kind | None:
    if state is LeaseState.BLOCKED:
        return Kind.BLOCKED
    if state is LeaseState.ACTIVE:
        return Kind.ACTIVE
    return Kind.MOVING if LEASE.holds(state) else None


WORKER = {
    StepPhase.GENERATING: "rollout",
    StepPhase.GENRM_SCORING: "genrm",
    StepPhase.TEACHER_SCORING: "teacher",
    StepPhase.STUDENT_SCORING: "rollout",
    StepPhase.TRAINING: "trainer",
    StepPhase.EVALUATING: "rollout",
}
"""Whose work each phase is."""
DATA = (StepPhase.WRITING_BACK, StepPhase.PUBLISHING, StepPhase.FINALIZING)
"""The batch on its way from scores to the trainer."""
WHOLE = (StepPhase.SYNCING_WEIGHTS,)
"""All of it is work: engines take their weights while they come up."""


@dataclass
class StepTime:
    """Seconds of one step, and where they went."""

    step: int
    work: float = 0.0
    """A role was at its phase's work with its lease ACTIVE, or weights were on their way."""
    data: float = 0.0
    """The scored batch was written, published and finalised."""
    control: float = 0.0
    """All else: waits, grants, GPUs that come up and go down, proofs."""
    parts: list[tuple[PhaseTime, float, float]] = field(
        default_factory=list[tuple[PhaseTime, float, float]]
    )
    """Each phase, with the Unix seconds at which its work began and ended in it."""

    @property
    def seconds(self) -> float:
        return self.work + self.data + self.control

    @property
    def control_share(self) -> float | None:
        """None of a step without any time."""
        return self.control / self.seconds if self.seconds > 0 else None


class SpanIndex:
    """Spans by role and time; those of one role follow one another."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._roles: dict[str, list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            self._roles.setdefault(span.role, []).append(span)
        self._starts = {role: [s.start for s in mine] for role, mine in self._roles.items()}

    def within(self, role: str, start: float, stop: float) -> list[Span]:
        """Those of ``role`` that reach into the stretch."""
        if role not in self._roles:
            return []
        starts = self._starts[role]
        first = max(bisect_right(starts, start) - 1, 0)
        found = self._roles[role][first : bisect_left(starts, stop)]
        return [span for span in found if span.stop > start]


def time_of(step: StepRecord, spans: SpanIndex) -> StepTime:
    """What the phases of a step were spent on."""
    told = StepTime(step.step)
    for phase in step.result.phases:
        ends = phase.started + phase.seconds
        role = WORKER.get(phase.phase)
        work, first, last = phase.seconds, phase.started, ends
        if role is not None:
            inside = [
                (max(span.start, phase.started), min(span.stop, ends))
                for span in spans.within(role, phase.started, ends)
                if span.kind is Kind.ACTIVE
            ]
            work = sum(stop - start for start, stop in inside)
            first = min((start for start, _ in inside), default=ends)
            last = max((stop for _, stop in inside), default=ends)
            told.work += work
            told.control += max(phase.seconds - work, 0.0)
        elif phase.phase in WHOLE:
            told.work += work
        elif phase.phase in DATA:
            told.data += work
        else:
            told.control += work
            first = last = ends
        told.parts.append((phase, first, last))
    return told
