"""How the time of steps went: phases, shares, and the part that was control."""

import statistics
from collections.abc import Sequence

from relax_infer.contracts.run import StepRecord
from relax_infer.machines import StepPhase
from relax_infer.report.charts import Bar, Curve, bar_rows, line_chart
from relax_infer.report.spans import WORKER, StepTime

COLOURS = {
    StepPhase.GENERATING: "--rollout",
    StepPhase.GENRM_SCORING: "--genrm",
    StepPhase.TEACHER_SCORING: "--teacher",
    StepPhase.STUDENT_SCORING: "--rollout",
    StepPhase.WRITING_BACK: "--data",
    StepPhase.PUBLISHING: "--data",
    StepPhase.FINALIZING: "--data",
    StepPhase.TRAINING: "--trainer",
    StepPhase.SYNCING_WEIGHTS: "--sync",
    StepPhase.EVALUATING: "--evaluate",
}
_LEGEND = (
    ("generate", "--rollout"),
    ("judge", "--genrm"),
    ("teach", "--teacher"),
    ("write, publish", "--data"),
    ("train", "--trainer"),
    ("sync weights", "--sync"),
    ("evaluate", "--evaluate"),
    ("control", "--control"),
)
SLOWEST, NEWEST = 20, 40
_ABOUT = (
    "Control is everything but work: waits, grants, GPUs that come up and let go, proofs. Work is"
    " the time in which the phase's own role had its lease ACTIVE, the whole of a weight sync, and"
    " the scored batch on its way to the trainer."
)


def timeline(steps: Sequence[StepRecord], times: Sequence[StepTime]) -> str:
    """Rows of steps, and how the share of control went."""
    trained = [t for t in times if t.step > 0 and t.parts]
    if not trained:
        return '<p class="quiet">No step has trained yet.</p>'
    shown = _shown(trained)
    rows = [(f"step {t.step}", _bars(t)) for t in shown]
    about = _ABOUT
    if len(shown) < len(trained):
        about += f" Of {len(trained)} steps the {SLOWEST} slowest and the {NEWEST} newest."
    return bar_rows("Phases of each step", rows, _LEGEND, about) + (
        '<div class="charts">' + _over_steps(steps, trained) + "</div>"
    )


def control_share(times: Sequence[StepTime]) -> float | None:
    """Of all the steps that trained."""
    trained = [t for t in times if t.step > 0]
    total = sum(t.seconds for t in trained)
    return sum(t.control for t in trained) / total if total > 0 else None


def phase_table(times: Sequence[StepTime]) -> str:
    """Seconds of each phase over the steps that have it."""
    seconds: dict[StepPhase, list[float]] = {}
    for told in times:
        for phase, _, _ in told.parts if told.step > 0 else ():
            seconds.setdefault(phase.phase, []).append(phase.seconds)
    total = sum(sum(each) for each in seconds.values())
    if total <= 0:
        return ""
    rows = "".join(
        f"<tr><td>{phase}</td><td>{len(each)}</td><td>{statistics.median(each):.2f}</td>"
        f"<td>{_ninetieth(each):.2f}</td><td>{max(each):.2f}</td>"
        f"<td>{100 * sum(each) / total:.1f} %</td></tr>"
        for phase, each in seconds.items()
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("phase", "steps", "median s", "90 % s", "longest s", "share")
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _ninetieth(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]


def _shown(times: Sequence[StepTime]) -> list[StepTime]:
    if len(times) <= SLOWEST + NEWEST:
        return list(times)
    newest = list(times[-NEWEST:])
    slowest = sorted(times[:-NEWEST], key=lambda t: t.seconds)[-SLOWEST:]
    return sorted([*slowest, *newest], key=lambda t: t.step)


def _bars(told: StepTime) -> list[Bar]:
    began = told.parts[0][0].started
    bars: list[Bar] = []
    for phase, first, last in told.parts:
        ends = phase.started + phase.seconds
        title = f"step {told.step} {phase.phase}: {phase.seconds:.2f} s"
        if phase.phase in WORKER:
            title += f", at work for {max(last - first, 0):.2f} s"
        pieces = (
            (phase.started, first, "--control"),
            (first, last, COLOURS.get(phase.phase, "--control")),
            (last, ends, "--control"),
        )
        bars += [
            Bar(start - began, stop - start, colour, title)
            for start, stop, colour in pieces
            if stop > start
        ]
    return bars


def _over_steps(steps: Sequence[StepRecord], times: Sequence[StepTime]) -> str:
    tokens = {s.step: s.result.batch.response_tokens for s in steps if s.result.batch}
    generating = {
        t.step: sum(p.seconds for p, _, _ in t.parts if p.phase is StepPhase.GENERATING)
        for t in times
    }
    speed = [
        (float(step), tokens[step] / seconds)
        for step, seconds in generating.items()
        if seconds > 0 and step in tokens
    ]
    shares = [(float(t.step), 100 * s) for t in times if (s := t.control_share) is not None]
    return (
        line_chart(
            "Seconds of a step",
            [Curve("in all", [(t.step, t.seconds) for t in times], "--quiet")],
            low=0.0,
        )
        + line_chart("Control share, %", [Curve("control", shares, "--bad")], low=0.0)
        + line_chart(
            "Tokens a second",
            [Curve("generated, over the whole phase", speed, "--rollout")],
            low=0.0,
        )
    )
