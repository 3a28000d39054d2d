"""Everything about a run at once, for a terminal. Pure."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax_infer.cli._glance import Glance
from relax_infer.cli._view import blocked_lines, cells, number, state_line
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.run import RunProgress
from relax_infer.machines import RunState, StepPhase

ROWS = 8
"""Finished steps that are shown."""
SLOW = 2.0
"""Times its expected time after which a phase is marked."""
_REPLICAS = 32
"""Replicas that are shown one by one."""
_LONGEST = 90
"""Characters of an error in a cell of a table."""
_RUN_STYLES = {
    RunState.DONE: "green",
    RunState.FAILED: "red",
    RunState.BLOCKED: "bold yellow",
    RunState.PAUSED: "yellow",
    RunState.PAUSING: "yellow",
}
_STYLES = {
    "READY": "green",
    "ACTIVE": "green",
    "SLEEPING": "dim",
    "FAILED": "red",
    "DEAD": "red",
    "BLOCKED": "bold yellow",
}


def board(glance: Glance, page: str | None, note: str | None = None) -> RenderableType:
    """A look at a run."""
    parts: list[RenderableType] = [_facts(glance, page)]
    for table in (_phases(glance), _replicas(glance)):
        if table is not None:
            parts += [Text(), table]
    if glance.run.progress:
        parts += [Text(), _steps(glance.run.progress[-ROWS:])]
    for each in glance.run.progress[-ROWS:]:
        parts += [Text(f"step {each.step}: {alarm}", style="yellow") for alarm in each.alarms]
    if glance.run.state is RunState.BLOCKED:
        parts += [Text(), *(Text(line, style="yellow") for line in blocked_lines(glance))]
    if note:
        parts += [Text(), Text(note, style="yellow")]
    return Group(*parts)


def _facts(glance: Glance, page: str | None) -> Table:
    run = glance.run
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    facts.add_row("run", Text(state_line(glance), style=_RUN_STYLES.get(run.state, "")))
    if run.target:
        done = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=run.target, completed=run.step, width=30)
        done.add_row(bar, f"{run.step} of {run.target}")
        facts.add_row("steps", done)
    if glance.step is not None:
        told = f" ({glance.told})" if glance.told else ""
        facts.add_row("now", Text(f"{glance.step.phase}: {glance.step.doing}{told}"))
    if glance.lease is not None:
        facts.add_row(f"pool {glance.lease.pool}", lease_text(glance.lease))
        if glance.lease.batch is not None:
            facts.add_row("batch", f"{glance.lease.batch.batch} {glance.lease.batch.state}")
    facts.add_row("reward", number(run.reward))
    facts.add_row("accuracy", number(run.accuracy))
    evaluated = next((p.evaluated for p in reversed(run.progress) if p.evaluated), {})
    for name, value in evaluated.items():
        facts.add_row(f"  {name}", number(value))
    weights = "-" if run.weight_version is None else str(run.weight_version)
    if glance.staleness is not None:
        weights += f", staleness {glance.staleness}"
    facts.add_row("weights", weights)
    if glance.tokens_per_second is not None and glance.last is not None:
        text = f"{glance.tokens_per_second:.0f} generated in step {glance.last.step}"
        facts.add_row("tokens/s", text)
    if run.gateway_url:
        facts.add_row("gateway", run.gateway_url)
    if page:
        facts.add_row("web UI", Text(page, style="cyan"))
    return facts


def lease_text(lease: LeaseStatus) -> Text:
    """Every role of the pool with its state; who holds it, and under which token, first."""
    text = Text("free" if lease.holder is None else "")
    roles = sorted(lease.roles.items(), key=lambda item: item[0] != lease.holder)
    for k, (role, held) in enumerate(roles):
        before = "" if k == 0 and lease.holder is not None else ", "
        text.append(f"{before}{role} ").append(str(held.state), _STYLES.get(held.state, ""))
        if role == lease.holder and held.fence is not None:
            text.append(f" under token {held.fence.counter}")
        if held.reason:
            text.append(f" ({held.reason})")
    return text


def _phases(glance: Glance) -> Table | None:
    if not glance.phases:
        return None
    step = glance.step.step if glance.step is not None else glance.run.step + 1
    table = _table(f"step {step}", "seconds", "expected")
    for k, phase in enumerate(glance.phases):
        known = glance.expected.get(phase.phase)
        slow = known is not None and phase.seconds > max(SLOW * known, known + 1)
        at_work = k == len(glance.phases) - 1
        table.add_row(
            Text(phase.phase, style="bold" if at_work else ""),
            Text(f"{phase.seconds:.1f}", style="yellow" if slow else ""),
            "-" if known is None else f"{known:.1f}",
        )
    seen = {phase.phase for phase in glance.phases}
    for name, known in glance.expected.items():
        if name not in seen and name != StepPhase.EVALUATING:  # not every step does it
            table.add_row(Text(name, style="dim"), "-", f"{known:.1f}")
    return table


def _replicas(glance: Glance) -> Table | None:
    if not glance.groups:
        return None
    table = _table("replica", "state", "weights", "role in flight")
    rows = [(group, each) for group in glance.groups for each in group.replicas]
    for group, each in rows[:_REPLICAS]:
        wrong = f" {_short(each.error)}" if each.error else ""
        load = glance.load.get(group.role)
        table.add_row(
            Text(f"{group.role} {each.engine_id}"),
            Text(f"{each.state}{wrong}", style=_STYLES.get(each.state, "")),
            "-" if each.weight_version is None else str(each.weight_version),
            "-" if load is None else str(load),
        )
    if len(rows) > _REPLICAS:
        table.add_row(f"and {len(rows) - _REPLICAS} more", "", "", "")
    for group in glance.groups:
        if group.stuck:
            name = Text(f"{group.role} {group.model}")
            table.add_row(name, Text(_short(group.stuck), "yellow"), "", "")
    return table


def _short(error: str) -> str:
    """For a cell; `step explain` has the whole of it."""
    return error if len(error) <= _LONGEST else f"{error[:_LONGEST].rstrip()}…"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2), pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "state" else "right")
    return table


def _steps(progress: tuple[RunProgress, ...]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2), pad_edge=False)
    table.add_column("step", justify="right")
    for name, _ in cells(progress[0]):
        table.add_column(name, justify="right")
    table.add_column("seconds", justify="right")
    for each in progress:
        values = (value for _, value in cells(each))
        table.add_row(str(each.step), *values, f"{each.seconds:.1f}")
    return table
