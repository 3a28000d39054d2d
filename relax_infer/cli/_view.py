"""A run in words: lines for a log, a panel for a terminal. Pure."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_infer.cli._glance import Glance
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import RunProgress
from relax_infer.machines import RunState

ROWS = 8
"""Finished steps that the panel shows."""
_STYLES = {
    RunState.DONE: "green",
    RunState.FAILED: "red",
    RunState.BLOCKED: "bold yellow",
    RunState.PAUSED: "yellow",
    RunState.PAUSING: "yellow",
}


def state_line(glance: Glance) -> str:
    """State, what the run is doing, and why it does not go on."""
    run = glance.run
    text = f"{run.run}  {run.state}  {run.doing}".rstrip()
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


def finished_line(progress: RunProgress) -> str:
    """One finished step."""
    cells = "  ".join(f"{name} {value}" for name, value in _cells(progress) if value != "-")
    return f"step {progress.step:>3}  done in {progress.seconds:.1f} s  {cells}".rstrip()


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


def panel(glance: Glance, page: str | None, note: str | None = None) -> RenderableType:
    """Everything at once, for a terminal."""
    run = glance.run
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("run", Text(state_line(glance), style=_STYLES.get(run.state, "")))
    if run.target:
        done = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=run.target, completed=run.step, width=30)
        done.add_row(bar, f"{run.step} of {run.target}")
        facts.add_row("steps", done)
    if glance.step is not None:
        facts.add_row("now", f"{glance.step.phase}: {glance.step.doing}")
    facts.add_row("GPUs", holder(glance.lease))
    facts.add_row("reward", number(run.reward))
    facts.add_row("accuracy", number(run.accuracy))
    facts.add_row("weights", "-" if run.weight_version is None else str(run.weight_version))
    if run.gateway_url:
        facts.add_row("gateway", run.gateway_url)
    if page:
        facts.add_row("web UI", Text(page, style="cyan"))
    parts: list[RenderableType] = [facts]
    if run.progress:
        parts += [Text(), _steps(run.progress[-ROWS:])]
    if run.state is RunState.BLOCKED:
        parts += [Text(), *(Text(line, style="yellow") for line in blocked_lines(glance))]
    if note:
        parts += [Text(), Text(note, style="yellow")]
    return Group(*parts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _steps(progress: tuple[RunProgress, ...]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2), pad_edge=False)
    table.add_column("step", justify="right")
    for name, _ in _cells(progress[0]):
        table.add_column(name, justify="right")
    table.add_column("seconds", justify="right")
    for each in progress:
        values = (value for _, value in _cells(each))
        table.add_row(str(each.step), *values, f"{each.seconds:.1f}")
    return table


def _cells(progress: RunProgress) -> tuple[tuple[str, str], ...]:
    return (
        ("reward", number(progress.reward)),
        ("accuracy", number(progress.accuracy)),
        ("teacher KL", number(progress.teacher_kl)),
        ("loss", number(progress.loss)),
    )
