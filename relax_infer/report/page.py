"""The report's page: what was learned, how the time went, who held the GPUs."""

from collections.abc import Callable, Iterable, Mapping
from html import escape

from relax_infer.config import Recipe
from relax_infer.contracts.lease import LeaseTransition
from relax_infer.contracts.run import StepRecord
from relax_infer.machines import LEASE, LeaseState, StepPhase
from relax_infer.placement import placement_svg, plan_inference_placement
from relax_infer.report.charts import Bar, Curve, bar_rows, line_chart
from relax_infer.report.records import RunRecords

_ROLE_COLOURS = {
    "rollout": "--rollout",
    "genrm": "--genrm",
    "teacher": "--teacher",
    "trainer": "--trainer",
}
_PHASE_COLOURS = {
    StepPhase.GENERATING: "--rollout",
    StepPhase.ROLLOUT_OFFLOADING: "--control",
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
_LEGEND = [
    ("generate", "--rollout"),
    ("judge", "--genrm"),
    ("teach", "--teacher"),
    ("write back, publish", "--data"),
    ("train", "--trainer"),
    ("sync weights", "--sync"),
    ("evaluate", "--evaluate"),
    ("hand over", "--control"),
]
_ROWS_SHOWN = 60

_STYLE = """
:root{--ink:#1c2430;--paper:#fff;--quiet:#667085;--line:#e4e7ec;--rollout:#2f6fde;--genrm:#d9822b;
--teacher:#7b4fc9;--trainer:#1d9a6c;--data:#8a94a6;--sync:#14a3b8;--evaluate:#c2417c;
--control:#c9ced8;--bad:#c62828}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--paper:#12161d;--quiet:#98a2b3;
--line:#2a313d;--control:#475063}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1060px;padding:24px 16px;color:var(--ink);
background:var(--paper);font:15px/1.5 system-ui,sans-serif}h1{font-size:24px;margin:0}
h2{font-size:17px;margin:28px 0 8px}.quiet{color:var(--quiet)}
.facts{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}
.facts div{border:1px solid var(--line);border-radius:8px;padding:8px 14px;min-width:120px}
.facts b{display:block;font-size:20px}.charts{display:grid;gap:16px;
grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr))}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:10px}
figcaption{font-weight:600;font-size:14px;margin-bottom:4px}.key{font-weight:400;
color:var(--quiet);margin-left:10px;white-space:nowrap}.key i{display:inline-block;width:9px;
height:9px;border-radius:2px;margin-right:4px}svg{width:100%;height:auto;display:block}
svg line{stroke:var(--line)}svg text{fill:var(--quiet);font-size:10px}.end{text-anchor:end}
.mid{text-anchor:middle}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;
font-size:13px}td,th{padding:4px 8px;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}td:first-child,th:first-child{text-align:left}.bad{color:var(--bad)}
code{font-size:12px}
"""


def page(records: RunRecords) -> str:
    """The whole file."""
    name = escape(records.run)
    steps = records.steps
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{name}</title>
<style>{_STYLE}</style></head><body>
<h1>{name}</h1><p class="quiet">Recipe {escape(str(records.recipe.get("name", "?")))},
{len([s for s in steps if s.step > 0])} training steps on record.</p>
{_facts(steps)}
<h2>What was learned</h2><div class="charts">{_curves(steps)}</div>
<h2>How the time went</h2>{_timeline(steps)}
{_placement(records.recipe)}<h2>Who held the GPUs</h2>{_holders(steps)}
{_incidents(steps)}
<h2>Steps</h2><div class="scroll">{_table(steps)}</div>
</body></html>
"""


def _facts(steps: tuple[StepRecord, ...]) -> str:
    accuracy = _points(steps, _accuracy)
    reward = _points(steps, _reward)
    seconds = sum(phase.seconds for step in steps for phase in step.result.phases)
    failed = sum(step.outcome is StepPhase.FAILED for step in steps)
    facts = [
        ("accuracy at first", f"{accuracy[0][1]:.3f}" if accuracy else "-"),
        ("accuracy at last", f"{accuracy[-1][1]:.3f}" if accuracy else "-"),
        ("mean reward at last", f"{reward[-1][1]:.3f}" if reward else "-"),
        ("weight version", str(steps[-1].result.weights.version)),
        ("seconds in steps", f"{seconds:.0f}"),
        ("failed steps", str(failed)),
    ]
    cells = "".join(
        f'<div><b>{value}</b><span class="quiet">{name}</span></div>' for name, value in facts
    )
    return f'<div class="facts">{cells}</div>'


def _curves(steps: tuple[StepRecord, ...]) -> str:
    return "".join(
        (
            line_chart(
                "Accuracy on held-out problems",
                [Curve("greedy", _points(steps, _accuracy), "--evaluate")],
                low=0.0,
            ),
            line_chart(
                "Mean reward of the batch",
                [
                    Curve("reward", _points(steps, _reward), "--genrm"),
                    Curve("exactly right", _points(steps, _exact), "--trainer"),
                ],
                low=0.0,
            ),
            line_chart(
                "KL to the Teacher per token",
                [Curve("rollout - teacher", _points(steps, _teacher_kl), "--teacher")],
            ),
            line_chart(
                "Rollout against trainer log-probs",
                [Curve("mean absolute gap", _points(steps, _gap), "--rollout")],
                low=0.0,
            ),
        )
    )


def _timeline(steps: tuple[StepRecord, ...]) -> str:
    rows: list[tuple[str, list[Bar]]] = []
    for step in [s for s in steps if s.step > 0][-_ROWS_SHOWN:]:
        if not step.result.phases:
            continue
        began = step.result.phases[0].started
        bars = [
            Bar(
                phase.started - began,
                phase.seconds,
                _PHASE_COLOURS.get(phase.phase, "--control"),
                f"step {step.step} {phase.phase}: {phase.seconds:.2f} s",
            )
            for phase in step.result.phases
        ]
        rows.append((f"step {step.step}", bars))
    return bar_rows("Phases of each step", rows, _LEGEND)


def _placement(recipe: Mapping[str, object]) -> str:
    """The plan's picture; nothing where the recipe on record is none that can be placed today."""
    try:
        plan = plan_inference_placement(Recipe.model_validate(recipe))
    except ValueError:
        return ""
    picture = placement_svg(plan, inline=True)
    return f"<h2>Who has which GPUs</h2><figure>{picture}</figure>\n"


def _holders(steps: tuple[StepRecord, ...]) -> str:
    transitions = sorted(
        (
            LeaseTransition.model_validate(t)
            for step in steps
            if step.step > 0  # the first launch of the engines would dwarf every step
            for t in step.transitions
        ),
        key=lambda t: t.at,
    )
    if not transitions:
        return '<p class="quiet">No lease transition is on record.</p>'
    began, ended = transitions[0].at, transitions[-1].at
    rows: list[tuple[str, list[Bar]]] = []
    for role, colour in _ROLE_COLOURS.items():
        bars = list(_holds(role, colour, transitions, began, ended))
        if bars:
            rows.append((role, bars))
    legend = [("held", "--quiet"), ("blocked", "--bad")]
    return bar_rows("Leases, in seconds since the first", rows, legend)


def _holds(
    role: str, colour: str, transitions: list[LeaseTransition], began: float, ended: float
) -> Iterable[Bar]:
    since: float | None = None
    blocked: float | None = None
    for t in (t for t in transitions if t.role == role):
        state = LeaseState(t.state)
        if blocked is not None and state is not LeaseState.BLOCKED:
            yield Bar(blocked - began, t.at - blocked, "--bad", f"{role} was blocked")
            blocked = None
        if state is LeaseState.BLOCKED:
            blocked = t.at
        if LEASE.holds(state) and since is None:
            since = t.at
        elif not LEASE.holds(state) and since is not None:
            title = f"{role} held for {t.at - since:.2f} s under fence {t.fence}"
            yield Bar(since - began, t.at - since, colour, title)
            since = None
    if since is not None:
        yield Bar(since - began, ended - since, colour, f"{role} holds")


def _incidents(steps: tuple[StepRecord, ...]) -> str:
    failed = [step for step in steps if step.error]
    if not failed:
        return ""
    items = "".join(f"<li>Step {s.step}: {escape(s.error or '')}</li>" for s in failed)
    return f'<h2>What went wrong</h2><ul class="bad">{items}</ul>'


def _table(steps: tuple[StepRecord, ...]) -> str:
    head = (
        "step", "outcome", "reward", "exact", "accuracy", "teacher KL", "loss", "grad norm",
        "samples", "dropped groups", "seconds", "weights", "digest",
    )  # fmt: skip
    body = "".join(_row(step) for step in steps)
    titles = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _row(step: StepRecord) -> str:
    result = step.result
    batch, training, evaluation = result.batch, result.training, result.evaluation
    cells = [
        str(step.step),
        f'<span class="bad">{step.outcome}</span>' if step.error else str(step.outcome),
        _number(batch.reward_mean if batch else None),
        _number(batch.exact_share if batch else None),
        _number(evaluation.accuracy if evaluation else None),
        _number(batch.teacher_kl if batch else None),
        _number(training.loss if training else None),
        _number(training.grad_norm if training else None),
        str(batch.samples) if batch else "-",
        str(batch.dropped_groups) if batch else "-",
        f"{sum(phase.seconds for phase in result.phases):.2f}",
        str(result.weights.version),
        f"<code>{result.weights.digest[:12]}</code>",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _points(
    steps: tuple[StepRecord, ...], value: Callable[[StepRecord], float | None]
) -> list[tuple[float, float]]:
    return [(s.step, v) for s in steps if (v := value(s)) is not None]


def _accuracy(step: StepRecord) -> float | None:
    return step.result.evaluation.accuracy if step.result.evaluation else None


def _reward(step: StepRecord) -> float | None:
    return step.result.batch.reward_mean if step.result.batch else None


def _exact(step: StepRecord) -> float | None:
    return step.result.batch.exact_share if step.result.batch else None


def _teacher_kl(step: StepRecord) -> float | None:
    return step.result.batch.teacher_kl if step.result.batch else None


def _gap(step: StepRecord) -> float | None:
    return step.result.training.logprob_gap if step.result.training else None
