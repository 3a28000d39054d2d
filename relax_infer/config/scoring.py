"""The recipe's scorers: judges, Teachers, rewards, distillation."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from relax_infer.config.placed import (
    Count,
    Engine,
    Free,
    ModelId,
    Pattern,
    Positive,
    Seconds,
    Section,
    ServedModel,
    own_rules,
)

REWARDS = ("genrm", "exact", "reasoning_gym", "math_verify", "environment", "random", "none")
"""Rewards that need no import."""


def _known_reward(source: str) -> str:
    if source not in REWARDS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source):
        raise ValueError(f"must be {', '.join(REWARDS)} or package.module:name of an adapter")
    return source


def _address(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError("must be http://host:port or https://host:port, with a path or without")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_address)]
JUDGE_PLACES = ("prompt", "response", "answer")
"""What a judge's prompt may show."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Verdict(Section):
    """How a judge's answer is read. What is not read beyond doubt is no score."""

    pattern: Pattern | None = None
    """Regular expression with a named group for each value, for instance
    `Verdict: (?P<score>yes|no)$`. It must match once. Empty: the answer is one JSON object."""
    labels: dict[str, Finite] = Field(default_factory=dict)
    """Words and the numbers they stand for."""
    lowest: Finite = 0.0
    """A number below it is no score."""
    highest: Finite = 1.0
    """A number above it is no score."""

    @model_validator(mode="after")
    def _is_a_rule(self, info: ValidationInfo) -> "Verdict":
        if not own_rules(info):
            return self
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} is not below highest {self.highest:g}")
        for label, number in self.labels.items():
            if not self.lowest <= number <= self.highest:
                raise ValueError(
                    f"labels.{label} is {number:g}, not from {self.lowest:g} to {self.highest:g}"
                )
        return self


class JudgeSampling(Section):
    """How a judge samples."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """0: its likeliest words. Above, a sample that is judged again may get another score."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus."""
    top_k: Positive | None = None
    """Likeliest tokens that are sampled from; empty: all."""


class GenRM(Section):
    """A generative reward model that judges the samples."""

    model: str
    """Hugging Face folder, or ``tiny:genrm``."""
    model_id: ModelId = "judge"
    """Name in the role's registry, without a slash."""
    url: Url | None = None
    """Of an SGLang server, or of a role at a gateway, that somebody else runs: `<url>/generate` is
    asked, no engines are started, and `model` gives the tokenizer only. Empty: engines of ours."""
    max_new_tokens: Positive = 256
    """Tokens of a verdict."""
    sampling: JudgeSampling = JudgeSampling()
    prompt: str | None = None
    """What a judge is shown, with `{prompt}`, `{response}` and `{answer}` in their places. Empty:
    the task's own prompt and verdicts."""
    system: str | None = None
    """System message before the prompt."""
    chat: bool = True
    """The prompt is a user's message in the judge's own chat template; false: plain text."""
    chat_template_kwargs: Free = Field(default_factory=dict)
    """Switches of that template, for instance `enable_thinking: false`."""
    verdict: Verdict | None = None
    """How answers to the prompt are read."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Times a sample is asked about again at once after a judge said that it is busy (429, 503).
    What fails otherwise is asked again by the phase's next attempt, or not at all."""
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    num_gpus: Count | None = None
    """GPUs of the role; empty: what its engines need."""
    engine: Engine = Engine()
    extra_models: tuple[ServedModel, ...] = ()
    """Further models that judge, each with engines of its own."""


class Teacher(Section):
    """A model whose log-probs the policy is distilled from (on-policy distillation)."""

    model: str
    """Hugging Face folder, or ``tiny:teacher``."""
    model_id: ModelId = "teacher"
    """Name in the role's registry, without a slash."""
    url: Url | None = None
    """Of an SGLang server, or of a role at a gateway, that somebody else runs, with the policy's
    tokens: `<url>/generate` is asked and no engines are started. Empty: engines of ours."""
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    max_logprob_cells: Positive = 262_144
    """Log-probs that one request may ask for: positions times token ids. A response with more is
    asked about in pieces."""
    num_gpus: Count | None = None
    """GPUs of the role; empty: what its engines need. The models have equal parts."""
    engine: Engine = Engine()
    extra_models: tuple[ServedModel, ...] = ()
    """Further models that teach, each with engines of its own."""


class Combine(Section):
    """One reward of several judges' scores. A sample that one of them could not score has none."""

    rule: Literal["mean", "min", "max", "all", "weighted"] = "mean"
    """all: 1 where every judge gives at least `passes`, else 0. weighted: the mean by `weights`."""
    passes: Finite = 1.0
    """Rule all: the score that passes."""
    weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Rule weighted: of each judge, by its model_id."""


class Reward(Section):
    """Where a sample's reward comes from."""

    source: Annotated[str, AfterValidator(_known_reward)] = "genrm"
    """`genrm`: a GenRM's verdict. `exact`: the task's own checker, right or wrong.
    `reasoning_gym`: the dataset's own score. `math_verify`: the response's last expression equals
    the right answer. `environment`: what rollout.environment gave. `random`: a coin (a negative
    control). `none`: no reward. Or `package.module:name` of a RewardAdapter that the workers can
    import."""
    unfinished: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Reward of a response that hit its token limit: a rule of the task, not a failed score."""
    key: str = "score"
    """Which value of a judge's verdict is the reward."""
    combine: Combine = Combine()
    """How the scores of several judges become one."""
    on_unscored: Literal["fail", "drop_group"] = "fail"
    """A score that could not be had fails the batch, or drops its group with the reason."""


class Distillation(Section):
    """On-policy distillation from the Teacher."""

    coefficient: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Mode student_sampled: times (teacher - rollout log-prob) of each sampled token, added to its
    advantage. The other modes: times the divergence over the named tokens, added to the loss."""
    mode: Literal["student_sampled", "student_topk", "teacher_topk", "union"] = "student_sampled"
    """Which tokens of each position the Teacher gives log-probs of: the sampled one; the policy's
    likeliest; its own likeliest; or both. The sampled one is always among them."""
    top_k: Positive = 8
    """Likeliest tokens of a position, in the modes that have any."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl"
    """Of policy and Teacher over the named tokens and, as one, all others: KL(policy, Teacher),
    KL(Teacher, policy), or the mean of both against their mean. The sampled token alone allows
    reverse_kl only."""

    @model_validator(mode="after")
    def _divergence_can_be_had(self, info: ValidationInfo) -> "Distillation":
        if not own_rules(info):
            return self
        if self.mode == "student_sampled" and self.divergence != "reverse_kl":
            raise ValueError(
                f"divergence is {self.divergence} but mode is student_sampled, which estimates"
                " reverse_kl: choose student_topk, teacher_topk or union"
            )
        return self
