"""What a look at a run shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import PhaseTime, RunStatus, StepResult, StepStatus
from relax_infer.machines import RUN


@dataclass(frozen=True)
class Glance:
    """A run at one moment. Parts that nobody answers for are None or empty."""

    run: RunStatus
    step: StepStatus | None = None
    """The step at work."""
    lease: LeaseStatus | None = None
    told: str | None = None
    """What the activities at work tell of themselves."""
    groups: tuple[GroupSnapshot, ...] = ()
    """Engine groups of every role."""
    phases: tuple[PhaseTime, ...] = ()
    """Of the step at work: those that are over, then the one at work with its time so far."""
    expected: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds of each phase by the run's own earlier steps."""
    load: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests in flight through the gateway, by role."""
    last: StepResult | None = None
    """The last step that trained."""

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.run.state in RUN.terminal

    @property
    def staleness(self) -> int | None:
        """Versions between the run's newest weights and those that the policy engines sample with;
        None while none of them answers."""
        versions = [
            replica.weight_version
            for group in self.groups
            if group.role == "rollout"
            for replica in group.replicas
            if replica.state == "READY" and replica.weight_version is not None
        ]
        if not versions or self.run.weight_version is None:
            return None
        return max(self.run.weight_version - min(versions), 0)

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens of the last step by the time that it generated."""
        if self.last is None or self.last.batch is None:
            return None
        seconds = sum(p.seconds for p in self.last.phases if p.phase == "GENERATING")
        return self.last.batch.response_tokens / seconds if seconds else None
