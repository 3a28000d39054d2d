"""The report's tables: facts, steps, transitions, recoveries, incidents."""

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.recovery import RecoveryTrace
from relax_infer.contracts.run import StepRecord
from relax_infer.machines import RecoveryState
from relax_infer.report.charts import Bar, bar_rows
from relax_infer.report.curves import accuracy, gap, points, reward
from relax_infer.report.incidents import Incident
from relax_infer.report.sampling import spread
from relax_infer.report.spans import StepTime
from relax_infer.report.timeline import control_share

STEPS = 150
"""Rows of the table of steps; those that gave up or warn come on top."""
TRANSITIONS = 200
INCIDENTS = 100
RECOVERIES = 60
_MARKED = 50
_STATES = {
    RecoveryState.STOPPING: "--genrm",
    RecoveryState.PROVING: "--teacher",
    RecoveryState.REBUILDING: "--rollout",
    RecoveryState.SYNCING: "--sync",
    RecoveryState.CHECKING: "--trainer",
    RecoveryState.BLOCKED: "--bad",
}


def escape(text: object) -> str:
    return html.escape(str(text))


def clock(at: float) -> str:
    """Date and time of day."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def facts(
    steps: Sequence[StepRecord], times: Sequence[StepTime], incidents: Sequence[Incident]
) -> str:
    """What matters at a glance."""
    share = control_share(times)
    gaps = points(steps, gap)
    told = [
        ("training steps", str(len([s for s in steps if s.step > 0]))),
        ("accuracy", _from_to(points(steps, accuracy))),
        ("mean reward", _from_to(points(steps, reward))),
        ("weight version", str(steps[-1].result.weights.version)),
        ("seconds in steps", f"{sum(t.seconds for t in times if t.step > 0):.0f}"),
        ("control share", "-" if share is None else f"{100 * share:.1f} %"),
        ("log-prob difference", f"{gaps[-1][1]:.2g}" if gaps else "-"),
        ("incidents", str(len(incidents))),
    ]
    cells = "".join(
        f'<div><b>{escape(value)}</b><span class="quiet">{name}</span></div>'
        for name, value in told
    )
    return f'<div class="facts">{cells}</div>'


def _from_to(values: Sequence[tuple[float, float]]) -> str:
    if not values:
        return "-"
    first, last = values[0][1], values[-1][1]
    return f"{last:.3f}" if len(values) == 1 else f"{first:.3f} → {last:.3f}"


def incident_list(incidents: Sequence[Incident]) -> str:
    """Each with the time to notice and to mend."""
    if not incidents:
        return '<p class="quiet">Nothing went wrong on record.</p>'
    shown = incidents[-INCIDENTS:]
    note = f"The newest {len(shown)} of {len(incidents)}." if len(shown) < len(incidents) else ""
    items = "".join(_incident(each) for each in shown)
    return (
        f"{_summary(incidents)}<ul class='incidents'>{items}</ul>"
        '<p class="about">Noticed within: from the last sign on record that all was well, so it is'
        f" an upper bound. Mended in: from the notice on. {note}</p>"
    )


def _summary(incidents: Sequence[Incident]) -> str:
    rows: list[str] = []
    for what, count in Counter(each.what for each in incidents).items():
        mine = [each for each in incidents if each.what == what]
        notice = [t for each in mine if (t := each.to_notice) is not None]
        mend = [t for each in mine if (t := each.to_mend) is not None]
        rows.append(
            f"<tr><td>{what}</td><td>{count}</td><td>{_longest(notice)}</td>"
            f"<td>{_longest(mend)}</td></tr>"
        )
    head = _head("what", "times", "noticed within, at most", "longest to mend")
    return _table(head, rows) + "<br>"


def _longest(values: Sequence[float]) -> str:
    return duration(max(values)) if values else "-"


def _incident(each: Incident) -> str:
    soft = each.what in ("phase repeated", "alarm")
    times: list[str] = []
    if each.to_notice is not None:
        times.append(f"noticed within {duration(each.to_notice)}")
    if each.to_mend is not None:
        times.append(f"mended in {duration(each.to_mend)}")
    elif each.what in ("replica lost", "lease blocked"):
        times.append("not mended on record")
    return (
        f'<li{" class=warn" if soft else ""}><div class="head"><b>{each.what}</b>'
        f'<span>{escape(each.who)}</span><span class="quiet">step {each.step},'
        f" {clock(each.noticed)}</span><b>{', '.join(times)}</b></div>"
        f"<p>{escape(each.cause)}</p>"
        f"{f'<p class=quiet>{escape(each.ending)}</p>' if each.ending else ''}</li>"
    )


def recovery_table(traces: Sequence[RecoveryTrace]) -> str:
    """Every replica that was lost: each state and how long it was in it."""
    if not traces:
        return '<p class="quiet">No replica was lost on record.</p>'
    rows: list[str] = []
    for trace in traces:
        ends = [*(at for _, at in trace.states[1:]), None]
        went = " → ".join(
            f"{state}{f' {duration(end - at)}' if end is not None else ''}"
            for (state, at), end in zip(trace.states, ends, strict=True)
        )
        rows.append(
            f"<tr><td>{escape(trace.role)} {escape(trace.engine_id)}</td>"
            f"<td>{clock(trace.states[0][1])}</td>"
            f'<td class="left wrap">{escape(went)}</td></tr>'
        )
    return _recovery_bars(traces) + _table(
        _head("replica", "noticed") + "<th class='left'>states</th>", rows
    )


def _recovery_bars(traces: Sequence[RecoveryTrace]) -> str:
    rows: list[tuple[str, list[Bar]]] = []
    for trace in traces[-RECOVERIES:]:
        began = trace.states[0][1]
        bars = [
            Bar(at - began, end - at, _STATES.get(state, "--control"), f"{state}: {end - at:.2f} s")
            for (state, at), (_, end) in pairwise(trace.states)
        ]
        rows.append((f"{trace.role} {trace.engine_id}", bars))
    about = f"The newest {RECOVERIES} of {len(traces)}." if len(traces) > RECOVERIES else ""
    legend = [(state.lower(), colour) for state, colour in _STATES.items()]
    return bar_rows("Recoveries, from the notice on", rows, legend, about)


def transition_table(transitions: Sequence[LeaseTransition]) -> str:
    """The newest transitions, and how often there was each."""
    if not transitions:
        return '<p class="quiet">No lease transition is on record.</p>'
    counted = Counter((t.role, t.event, str(t.state)) for t in transitions)
    counts = [
        f"<tr><td>{escape(role)}</td><td class='left'>{_words(event)}</td>"
        f"<td class='left'>{state}</td><td>{count}</td></tr>"
        for (role, event, state), count in sorted(counted.items())
    ]
    shown = transitions[-TRANSITIONS:]
    before: dict[str, float] = {}
    rows: list[str] = []
    for t in shown:
        gone = f"{t.at - before[t.role]:.2f}" if t.role in before else "-"
        before[t.role] = t.at
        bad = " class='left bad'" if t.state == "BLOCKED" else " class='left'"
        rows.append(
            f"<tr><td>{clock(t.at)}</td><td class='left'>{escape(t.role)}</td>"
            f"<td class='left'>{_words(t.event)}</td><td{bad}>{t.state}</td>"
            f"<td>{t.fence}</td><td>{gone}</td></tr>"
        )
    return (
        f"<details><summary>How often each of {len(transitions)} transitions was made</summary>"
        f"{_table(_head('role', 'event', 'to', 'times'), counts)}</details>"
        f"<details><summary>The newest {len(shown)} one by one</summary>"
        + _table(_head("when", "role", "event", "to", "token", "s since its last"), rows)
        + "</details>"
    )


def step_table(steps: Sequence[StepRecord], times: Sequence[StepTime]) -> str:
    """A row for each step; of many, evenly spread ones and those that gave up or warn."""
    marked = [s.step for s in steps if s.error or s.result.alarms][-_MARKED:]
    kept = {*spread([s.step for s in steps], STEPS), *marked}
    seconds = {t.step: t for t in times}
    head = _head(
        "step", "outcome", "reward", "right", "accuracy", "teacher KL", "loss", "grad norm",
        "log-prob diff.", "samples", "dropped", "stale", "seconds", "control", "weights", "digest",
    )  # fmt: skip
    rows = [_step(step, seconds[step.step]) for step in steps if step.step in kept]
    note = ""
    if len(rows) < len(steps):
        note = (
            f'<p class="about">{len(rows)} of {len(steps)} steps: evenly spread ones, and those'
            " that gave up or warn.</p>"
        )
    return _table(head, rows) + note


def _step(step: StepRecord, told: StepTime) -> str:
    result = step.result
    batch, training, evaluation = result.batch, result.training, result.evaluation
    kind = "bad" if step.error else "warn" if result.alarms else ""
    share = told.control_share
    cells = [
        str(step.step),
        f'<span class="{kind}">{step.outcome}</span>',
        _number(batch.reward_mean if batch else None),
        _number(batch.exact_share if batch else None),
        _number(evaluation.accuracy if evaluation else None),
        _number(batch.teacher_kl if batch else None),
        _number(training.loss if training else None),
        _number(training.grad_norm if training else None),
        f"{training.logprob_gap:.2g}" if training else "-",
        str(batch.samples) if batch else "-",
        str(batch.dropped_groups) if batch else "-",
        str(batch.staleness) if batch else "-",
        f"{told.seconds:.2f}",
        "-" if share is None else f"{100 * share:.0f} %",
        str(result.weights.version),
        f"<code>{escape(result.weights.digest[:12])}</code>",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def evaluation_table(steps: Sequence[StepRecord]) -> str:
    """The newest evaluation, set by set."""
    newest = [s.result.evaluation for s in steps if s.result.evaluation]
    if not newest or not newest[-1].sets:
        return ""
    evaluation = newest[-1]
    ks = sorted({k for each in evaluation.sets for k in each.pass_at})
    rows: list[str] = []
    for each in evaluation.sets:
        error = "" if each.accuracy_error is None else f" ± {each.accuracy_error:.3f}"
        passed = "".join(f"<td>{_number(each.pass_at.get(k))}</td>" for k in ks)
        answers = each.problems * each.samples
        rows.append(
            f"<tr><td>{escape(each.name)}</td><td>{each.problems} × {each.samples}</td>"
            f"<td>{each.accuracy:.4f}{error}</td>{passed}"
            f"<td>{each.response_tokens / answers:.1f}</td><td>{each.truncated}</td>"
            f"<td>{each.unanswered}</td></tr>"
        )
    names = [f"pass@{k}" for k in ks]
    head = _head(
        "set", "problems × answers", "accuracy", *names, "mean tokens", "at limit", "refused"
    )
    return (
        f"<h3>Evaluation of step {evaluation.step}, weights {evaluation.weight_version}</h3>"
        + _table(head, rows)
        + '<p class="about">± is the standard error over problems.</p>'
    )


def gaps_between(steps: Sequence[StepRecord]) -> float:
    """Seconds between one step's end and the next one's begin: pauses, waits for a person."""
    edges = [
        (s.result.phases[0].started, s.result.phases[-1].started + s.result.phases[-1].seconds)
        for s in steps
        if s.result.phases
    ]
    return sum(max(later[0] - earlier[1], 0.0) for earlier, later in pairwise(edges))


def _words(event: str) -> str:
    return escape(event.replace("_", " ").lower())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _head(*names: str) -> str:
    return "".join(f"<th>{name}</th>" for name in names)


def _table(head: str, rows: Iterable[str]) -> str:
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
