"""A run in words, a line each. Pure."""

from relax_infer.cli._glance import Glance
from relax_infer.contracts.engines import GroupSnapshot, ReplicaReport
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import PhaseTime, RunProgress


def state_line(glance: Glance) -> str:
    """State, what the run is doing, and why it does not go on."""
    run = glance.run
    text = f"{run.run}  {run.state}  {run.doing}".rstrip()
    if glance.told and glance.step is None:
        text += f": {glance.told}"
    # Most endings say the cause in what they do; once is enough.
    if run.error and run.error not in run.doing:
        text += f": {run.error}"
    return text


def work_line(glance: Glance) -> str | None:
    """The step at work; None if there is none."""
    step = glance.step
    if step is None:
        return None
    return f"step {step.step:>3}  {step.phase:<18} {step.doing}; GPUs: {holder(glance.lease)}"


def phase_line(glance: Glance, phase: PhaseTime) -> str:
    """A phase that is over."""
    step = glance.step.step if glance.step else glance.run.step + 1
    known = glance.expected.get(phase.phase)
    usual = f" (expected {known:.1f} s)" if known is not None else ""
    return f"step {step:>3}  {phase.phase:<18} took {phase.seconds:.1f} s{usual}"


def replica_line(group: GroupSnapshot, replica: ReplicaReport) -> str:
    """One replica: its state, its weights, what is wrong with it."""
    held = "" if replica.weight_version is None else f", weights {replica.weight_version}"
    wrong = f": {replica.error}" if replica.error else ""
    return f"{group.role} {replica.engine_id}  {replica.state}{held}{wrong}"


def finished_line(progress: RunProgress) -> str:
    """One finished step."""
    told = "  ".join(f"{name} {value}" for name, value in cells(progress) if value != "-")
    told += "".join(f"  {name} {value:.3f}" for name, value in progress.evaluated.items())
    warned = "".join(f"  warning: {alarm}" for alarm in progress.alarms)
    return f"step {progress.step:>3}  done in {progress.seconds:.1f} s  {told}{warned}".rstrip()


def step_line(step: int, phase: str, progress: RunProgress | None, error: str | None) -> str:
    """One step in the list of a run's steps."""
    shown = cells(progress) if progress is not None else ()
    numbers = "  ".join(f"{name} {value}" for name, value in shown if value != "-")
    took = f"{progress.seconds:.1f} s" if progress is not None else ""
    words = "  ".join(filter(None, (took, numbers, error)))
    return f"step {step:>3}  {phase:<18} {words}".rstrip()


def holder(lease: LeaseStatus | None) -> str:
    """Who has the GPUs."""
    if lease is None:
        return "unknown"
    blocked = [f"{role} BLOCKED" for role, r in lease.roles.items() if r.state == "BLOCKED"]
    if blocked:
        return ", ".join(blocked)
    if lease.holder is None:
        return "free"
    return f"{lease.holder} {lease.roles[lease.holder].state}"


def blocked_lines(glance: Glance) -> list[str]:
    """What a person is asked, and the command that answers."""
    run = glance.run
    reasons = [
        f"{role} may still hold its GPUs: {lease.reason}"
        for role, lease in (glance.lease.roles.items() if glance.lease else ())
        if lease.state == "BLOCKED"
    ]
    command = f"relax-infer resolve {run.run} --who NAME --why TEXT"
    if reasons:
        return [
            *reasons,
            "Look at the processes on the node; when that role is gone:",
            f"  {command} --confirm-released",
        ]
    return [f"To try again:  {command}", f"To stop:       {command} --stop"]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def cells(progress: RunProgress) -> tuple[tuple[str, str], ...]:
    """Name and value of what a finished step is judged by."""
    return (
        ("reward", number(progress.reward)),
        ("accuracy", number(progress.accuracy)),
        ("teacher KL", number(progress.teacher_kl)),
        ("loss", number(progress.loss)),
        ("log-prob gap", _small(progress.logprob_gap)),
    )
