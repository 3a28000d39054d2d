"""What was learned, as charts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_infer.contracts.run import StepRecord
from relax_infer.report.charts import Curve, line_chart

Value = Callable[[StepRecord], float | None]
_SETS = ("--evaluate", "--sync", "--teacher", "--genrm", "--trainer", "--rollout")


@dataclass(frozen=True)
class Chart:
    """A title, its curves (name, value, colour) and what a reader should know."""

    title: str
    curves: tuple[tuple[str, Value, str], ...]
    about: str = ""
    low: float | None = None
    log: bool = False


def learned(steps: Sequence[StepRecord], bound: float | None) -> str:
    """Every chart that there is a value for. ``bound``: of the mean log-prob difference."""
    return "".join(
        [
            _reward(steps),
            _accuracy(steps),
            *(_drawn(chart, steps) for chart in CHARTS[:3]),
            _drawn(_GAP, steps, bound),
            *(_drawn(chart, steps) for chart in CHARTS[3:]),
        ]
    )


def points(steps: Sequence[StepRecord], value: Value) -> list[tuple[float, float]]:
    """(step, value) where there is one."""
    return [(s.step, v) for s in steps if (v := value(s)) is not None]


def reward(step: StepRecord) -> float | None:
    return step.result.batch.reward_mean if step.result.batch else None


def accuracy(step: StepRecord) -> float | None:
    return step.result.evaluation.accuracy if step.result.evaluation else None


def gap(step: StepRecord) -> float | None:
    return step.result.training.logprob_gap if step.result.training else None


def _drawn(chart: Chart, steps: Sequence[StepRecord], bound: float | None = None) -> str:
    curves = [Curve(name, points(steps, value), c) for name, value, c in chart.curves]
    shown = bound if any(curve.points for curve in curves) else None
    return line_chart(
        chart.title, curves, low=chart.low, bound=shown, log=chart.log, about=chart.about
    )


def _reward(steps: Sequence[StepRecord]) -> str:
    return line_chart(
        "Reward of the batch",
        [
            Curve("mean reward", points(steps, reward), "--genrm"),
            Curve("right by the task's checker", points(steps, _exact), "--trainer"),
        ],
        low=0.0,
        about="Of the samples that are trained on; dropped groups are not among them.",
    )


def _accuracy(steps: Sequence[StepRecord]) -> str:
    names = dict.fromkeys(name for s in steps for name in _scores(s))
    curves = [
        Curve(name, points(steps, lambda s, n=name: _scores(s).get(n)), _SETS[k % len(_SETS)])
        for k, name in enumerate(names)
    ]
    return line_chart(
        "Evaluation",
        curves,
        low=0.0,
        about="Share of answers that are right, with the weights of the step pinned;"
        " pass@k is the unbiased estimate.",
    )


def _scores(step: StepRecord) -> dict[str, float]:
    evaluation = step.result.evaluation
    if evaluation is None:
        return {}
    return evaluation.scores or {"held-out problems": evaluation.accuracy}


def _exact(step: StepRecord) -> float | None:
    return step.result.batch.exact_share if step.result.batch else None


def _teacher_kl(step: StepRecord) -> float | None:
    return step.result.batch.teacher_kl if step.result.batch else None


def _trained(name: str) -> Value:
    def value(step: StepRecord) -> float | None:
        training = step.result.training
        return training.metrics.get(name) if training else None

    return value


def _weight(name: str) -> Value:
    """Of importance; None where there is none, and every weight is 1."""
    value = _trained(name)

    def told(step: StepRecord) -> float | None:
        training = step.result.training
        corrected = training is not None and training.metrics.get("importance_max", 1.0) != 1.0
        return value(step) if corrected else None

    return told


def _policy_kl(step: StepRecord) -> float | None:
    return step.result.training.policy_kl if step.result.training else None


def _largest_gap(step: StepRecord) -> float | None:
    return step.result.training.logprob_gap_max if step.result.training else None


def _staleness(step: StepRecord) -> float | None:
    return step.result.batch.staleness if step.result.batch else None


def _length(step: StepRecord) -> float | None:
    batch = step.result.batch
    return batch.response_tokens / batch.samples if batch and batch.samples else None


def _truncated(step: StepRecord) -> float | None:
    batch = step.result.batch
    return batch.truncated / batch.samples if batch and batch.samples else None


def _loss(step: StepRecord) -> float | None:
    return step.result.training.loss if step.result.training else None


def _norm(step: StepRecord) -> float | None:
    return step.result.training.grad_norm if step.result.training else None


def _clipped(step: StepRecord) -> float | None:
    return step.result.training.clip_fraction if step.result.training else None


_GAP = Chart(
    "Rollout against trainer log-probs",
    (("mean |difference|", gap, "--rollout"), ("largest", _largest_gap, "--quiet")),
    "Of the same sampled tokens, before the update, nats. What kernels, precision and stale weights"
    " make of one policy.",
    log=True,
)
CHARTS = (
    Chart(
        "KL, nats a token",
        (
            ("rollout to Teacher", _teacher_kl, "--teacher"),
            ("to the reference", _trained("reference_kl"), "--genrm"),
            ("rollout to trainer, over the update", _policy_kl, "--trainer"),
        ),
        "Estimated from the sampled tokens; one of few tokens may be below 0.",
    ),
    Chart("Entropy", (("policy, nats a token", _trained("entropy"), "--sync"),), low=0.0),
    Chart(
        "Staleness",
        (("most versions behind", _staleness, "--rollout"),),
        "Of the weights that sampled, against those that are trained.",
        low=0.0,
    ),
    Chart("Loss", (("loss", _loss, "--trainer"), ("critic", _trained("critic_loss"), "--sync"))),
    Chart("Gradient norm", (("before clipping", _norm, "--trainer"),), low=0.0),
    Chart(
        "Share of tokens",
        (
            ("ratio clipped", _clipped, "--evaluate"),
            ("response at its limit", _truncated, "--genrm"),
        ),
        "Of trained tokens, and of samples.",
        low=0.0,
    ),
    Chart(
        "Importance weights",
        (
            ("mean", _weight("importance_mean"), "--rollout"),
            ("largest", _weight("importance_max"), "--quiet"),
        ),
        "Trainer before its update over rollout engine, truncated.",
        low=0.0,
    ),
    Chart("Critic", (("explained variance", _trained("explained_variance"), "--sync"),)),
    Chart("Response length", (("mean tokens", _length, "--rollout"),), low=0.0),
    Chart("Learning rate", (("AdamW", _trained("learning_rate"), "--trainer"),), low=0.0),
)
"""After reward and accuracy; the log-prob difference comes after the third."""
