"""What a look at a run shows."""

from dataclasses import dataclass

from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import RunStatus, StepStatus
from relax_infer.machines import RUN


@dataclass(frozen=True)
class Glance:
    """A run at one moment. Parts that nobody answers for are None."""

    run: RunStatus
    step: StepStatus | None = None
    """The step at work."""
    lease: LeaseStatus | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.run.state in RUN.terminal
