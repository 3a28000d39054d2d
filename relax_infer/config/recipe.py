"""The recipe: everything that a run is, typed. Importable without torch, Ray or Temporal."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from relax_infer.config.evaluation import EvaluationPlan, known_source
from relax_infer.config.placed import (
    Cluster,
    Critic,
    Engine,
    Positive,
    RolloutModel,
    Seconds,
    Section,
    ServedModel,
    ServerGroup,
    TrainingGroup,
)
from relax_infer.contracts.alarms import LogProbBound, Nats
from relax_infer.contracts.algorithm import AlgorithmSpec, ScheduleSpec
from relax_infer.contracts.fractions import GpuFraction

REWARDS = ("genrm", "exact", "reasoning_gym", "math_verify", "random", "none")
"""Rewards that need no import."""


def _known_reward(source: str) -> str:
    if source not in REWARDS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", source):
        raise ValueError(f"must be {', '.join(REWARDS)} or package.module:name of an adapter")
    return source


class Data(Section):
    """Where prompts come from."""

    source: Annotated[str, AfterValidator(known_source)] = "tiny.sort4"
    """Task: prompts, right answers and a checker. `tiny.sort4`, or `reasoning_gym.<dataset>`."""
    held_out: Annotated[int, Field(ge=1, le=512)] = 512
    """Problems that are never trained on and serve evaluation."""
    config: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym: the dataset's own settings, its size among them."""
    seed: Annotated[int, Field(ge=0)] = 0
    """reasoning-gym: of the dataset's problems. Which of them a step draws is the run's seed."""
    system_prompt: str | None = None
    """reasoning-gym: what the policy is told before each question. Empty: to end with the answer
    between answer tags, which the datasets' scorers look for; '' tells it nothing."""


class Sampling(Section):
    """How the policy samples."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus."""
    max_new_tokens: Positive = 5
    """Tokens of a response, its end included."""


class Rollout(Section):
    """The policy that generates."""

    model: str
    """Hugging Face folder, or ``tiny:policy``."""
    prompts_per_step: Positive = 32
    """Prompts of a step; each makes one group."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Samples of a group."""
    sampling: Sampling = Sampling()
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    external: bool = False
    """Somebody else runs the engines: none are placed. Mode decoupled only."""
    num_gpus: Positive | None = None
    """GPUs of the role; empty: what its engines need. In mode decoupled its engines may need
    less, else they need exactly these."""
    engine: Engine = Engine()
    server_groups: tuple[ServerGroup, ...] | None = None
    """Groups of the policy's engines in place of replicas and gpus_per_replica of the engine
    section: all regular, or both prefill and decode."""
    extra_models: tuple[RolloutModel, ...] = ()
    """Further models that generate, each with engines of its own."""


JUDGE_PLACES = ("prompt", "response", "answer")
"""What a judge's prompt may show."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Verdict(Section):
    """How a judge's answer is read. What is not read beyond doubt is no score."""

    pattern: str | None = None
    """Regular expression with a named group for each value, for instance
    `Verdict: (?P<score>yes|no)$`. It must match once. Empty: the answer is one JSON object."""
    labels: dict[str, Finite] = Field(default_factory=dict)
    """Words and the numbers they stand for."""
    lowest: Finite = 0.0
    """A number below it is no score."""
    highest: Finite = 1.0
    """A number above it is no score."""

    @model_validator(mode="after")
    def _is_a_rule(self) -> "Verdict":
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern is no regular expression: {error}") from None
        if not self.lowest < self.highest:
            raise ValueError(f"lowest {self.lowest:g} is not below highest {self.highest:g}")
        for label, number in self.labels.items():
            if not self.lowest <= number <= self.highest:
                raise ValueError(
                    f"labels.{label} is {number:g}, not from {self.lowest:g} to {self.highest:g}"
                )
        return self


class GenRM(Section):
    """A generative reward model that judges the samples."""

    model: str
    """Hugging Face folder, or ``tiny:genrm``."""
    model_id: str = "judge"
    """Name in the role's registry."""
    max_new_tokens: Positive = 2
    """Tokens of a verdict."""
    prompt: str | None = None
    """What a judge is shown, with `{prompt}`, `{response}` and `{answer}` in their places. Empty:
    the task's own prompt and verdicts."""
    system: str | None = None
    """System message before the prompt."""
    chat: bool = True
    """The prompt is a user's message in the judge's own chat template; false: plain text."""
    verdict: Verdict | None = None
    """How answers to the prompt are read."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Times a sample is asked about again at once after a judge said that it is busy (429, 503).
    What fails otherwise is asked again by the phase's next attempt, or not at all."""
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    num_gpus: Positive | None = None
    """GPUs of the role; empty: what its engines need."""
    engine: Engine = Engine()
    extra_models: tuple[ServedModel, ...] = ()
    """Further models that judge, each with engines of its own."""


class Teacher(Section):
    """A model whose log-probs the policy is distilled from (on-policy distillation)."""

    model: str
    """Hugging Face folder, or ``tiny:teacher``."""
    model_id: str = "teacher"
    """Name in the role's registry."""
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    max_logprob_cells: Positive = 262_144
    """Log-probs that one request may ask for: positions times token ids. A response with more is
    asked about in pieces."""
    num_gpus: Positive | None = None
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
    the right answer. `random`: a coin (a negative control). `none`: no reward. Or
    `package.module:name` of a RewardAdapter that the workers can import."""
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

    coefficient: Annotated[float, Field(ge=0)] = 1.0
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
    def _divergence_can_be_had(self) -> "Distillation":
        if self.mode == "student_sampled" and self.divergence != "reverse_kl":
            raise ValueError(
                f"divergence is {self.divergence} but mode is student_sampled, which estimates"
                " reverse_kl: choose student_topk, teacher_topk or union"
            )
        return self


class Algorithm(AlgorithmSpec, Section):
    """How rewards become advantages, and advantages a loss."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "Algorithm":
        if self.importance != "none" and self.old_log_probs != "trainer":
            raise ValueError(
                f"importance is {self.importance} but old_log_probs is {self.old_log_probs}: the"
                " ratio against the rollout's log-probs corrects already; set old_log_probs to"
                " trainer, or importance to none"
            )
        if self.kl_coefficient > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 has no gradient as a loss, in expectation: use k2 or k3, or set"
                " kl_in to reward"
            )
        return self


class Schedule(ScheduleSpec, Section):
    """Learning rate over training steps: a linear warm-up to train.learning_rate, then style."""


class RecipeLogProbBound(LogProbBound, Section):
    """How far the engines' log-probs of the sampled tokens may be from the trainer's own, before
    the update. Past it the step's details, the progress line and the report warn. With stale
    samples the difference holds what the policy learned since, too."""

    mean: Nats = 0.1
    """Mean absolute difference over trained tokens, nats. 0: no bound."""


class Train(Section):
    """One policy update per step."""

    ranks: Positive = 1
    """Trainer ranks, one GPU each: tensor_parallel x pipeline_parallel x data parallel ranks."""
    tensor_parallel: Positive = 1
    """Ranks that share each layer's matrices."""
    pipeline_parallel: Positive = 1
    """Stages that share the layers."""
    sequence_parallel: bool = False
    """Tensor parallel ranks share the tokens between their matrices, too."""
    packed: bool = False
    """Sequences of a micro-batch one after another, without padding between them."""
    micro_batch_tokens: Positive = 16_384
    """Tokens of one forward and backward pass of a rank, padding included; a longer sequence is a
    pass of its own."""
    offload: bool = True
    """The trainer lets its GPUs go between its turns; false only in mode decoupled."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Of AdamW, at the top of its schedule."""
    schedule: Schedule = Schedule()
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW, for matrices; norms and biases do not decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The other end of that range."""
    mini_batches: Positive = 2
    """Optimizer steps of one pass over the batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights and activations; bf16: with float32 masters, gradients and optimizer state."""
    algorithm: Algorithm = Algorithm()
    logprob_bound: RecipeLogProbBound = RecipeLogProbBound()
    advantage_eps: Annotated[float, Field(gt=0)] = 1e-4
    """Added to a group's standard deviation of rewards."""
    ray_gpu_fraction: GpuFraction = 0.4
    """Share of a GPU that a trainer actor reserves with Ray."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""

    @model_validator(mode="after")
    def _ranks_have_a_layout(self) -> "Train":
        model = self.tensor_parallel * self.pipeline_parallel
        if self.ranks % model:
            raise ValueError(
                f"ranks is {self.ranks}, tensor_parallel x pipeline_parallel is {model}: make ranks"
                " a multiple of it"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "sequence_parallel needs tensor_parallel above 1: raise it, or leave it out"
            )
        return self


class Lease(Section):
    """How long a role may take to hand over its GPUs."""

    operation_timeout: Seconds = 180.0
    """Seconds after which an unanswered onload or offload blocks the lease."""
    reconcile_timeout: Seconds = 120.0
    """Seconds of automatic read-only reconcile before a person is asked."""


class Staging(Section):
    """Where samples, weights, checkpoints and records are kept."""

    url: str | None = None
    """fsspec URL; empty: the ``store`` folder of the local stack."""
    max_samples: Positive = 65_536
    """Samples that a step may make."""
    max_tokens: Positive = 268_435_456
    """Response tokens that a step may make, every response at its limit."""


class Recipe(Section):
    """A whole run."""

    name: str
    """Shown in lists and reports."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of prompts, sampling of mini-batches and the tiny weak policy."""
    steps: Positive = 40
    """Training steps."""
    mode: Literal["defer", "split", "decoupled"] = "defer"
    """defer: the roles share the pool, one after another. split: the inference roles have parts of
    the pool side by side, and take turns with training. decoupled: every role has a pool of its
    own."""
    max_staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """Mode decoupled: steps that generation may be ahead of training. 0: a step begins when the one
    before it has trained. 1: step n generates with weights n-2 or newer while step n-1 trains."""
    defer_roles: tuple[str, ...] | None = None
    """Mode defer: which of genrm and teacher take a turn of their own; the others are beside the
    rollout. Empty: all that take part."""
    layout: str | None = None
    """Which roles hold which part of the shared pool, phase by phase, for instance
    `rollout[1/2] + genrm[1/2] -> teacher -> actor[/]`; actor is the trainer. Empty: as mode
    says."""
    debug: Literal["train_only", "rollout_only"] | None = None
    """Place only the training roles, or only the inference roles."""
    phase_attempts: Positive = 5
    """Times a step runs a phase whose failure is transient, before it asks a person."""
    cluster: Cluster
    data: Data = Data()
    rollout: Rollout
    genrm: GenRM | None = None
    teacher: Teacher | None = None
    reward: Reward = Reward()
    distillation: Distillation | None = None
    train: Train = Train()
    critic: Critic | None = None
    """The value model. It shares the trainer's GPUs when it has as many ranks, except in mode
    decoupled."""
    reference: TrainingGroup | None = None
    """Ranks of the frozen reference policy, on a pool of their own."""
    actor_fwd: TrainingGroup | None = None
    """Ranks that compute the policy's log-probs only, on a pool of their own."""
    evaluation: EvaluationPlan = EvaluationPlan()
    lease: Lease = Lease()
    staging: Staging = Staging()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "Recipe":
        if self.max_staleness > 0 and self.mode != "decoupled":
            raise ValueError(
                f"max_staleness is {self.max_staleness} in mode {self.mode}: generation can be"
                " ahead of training only where each has GPUs of its own; set mode to decoupled, or"
                " max_staleness to 0"
            )
        if self.reward.source == "genrm" and self.genrm is None:
            raise ValueError(
                "reward.source is genrm but the recipe has no genrm section:"
                " add one, or set reward.source to exact"
            )
        if self.genrm is not None:
            self._judges_can_judge(self.genrm)
        if self.distillation is not None and self.teacher is None:
            raise ValueError(
                "distillation is set but the recipe has no teacher section:"
                " add one, or remove distillation"
            )
        if self.reward.source == "none" and not self.distilled:
            raise ValueError(
                "reward.source is none and nothing is distilled: there is nothing to learn from;"
                " set reward.source, or distillation with a coefficient above 0"
            )
        if self.distilled and self.rollout.sampling.temperature != 1.0:
            raise ValueError(
                "rollout.sampling.temperature must be 1.0 with distillation: the Teacher's"
                " log-probs are untempered, so the two could not be compared"
            )
        gym = self.data.source.startswith("reasoning_gym.")
        if self.reward.source == "reasoning_gym" and not gym:
            raise ValueError(
                f"reward.source is reasoning_gym but data.source is {self.data.source}: its scorers"
                " know only their own problems; set data.source to reasoning_gym.<dataset>"
            )
        if gym and self.rollout.model.startswith("tiny:"):
            raise ValueError(
                f"data.source is {self.data.source} but rollout.model is {self.rollout.model}: the"
                " tiny models know 22 characters and no words; name a folder with a policy and its"
                " tokenizer"
            )
        if not gym and (self.data.config or self.data.system_prompt is not None):
            raise ValueError(
                "data.config and data.system_prompt are for reasoning_gym.<dataset>, data.source is"
                f" {self.data.source}: remove them"
            )
        total = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if total > self.staging.max_samples:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.samples_per_prompt is {total} samples a step,"
                f" staging.max_samples is {self.staging.max_samples}: lower the former, or raise"
                " the limit if memory and store allow"
            )
        tokens = total * self.rollout.sampling.max_new_tokens
        if tokens > self.staging.max_tokens:
            raise ValueError(
                f"{total} samples x rollout.sampling.max_new_tokens is {tokens} tokens a step,"
                f" staging.max_tokens is {self.staging.max_tokens}: lower the former, or raise the"
                " limit if memory and store allow"
            )
        distillation, teacher = self.distillation, self.teacher
        if distillation is not None and distillation.mode != "student_sampled":
            assert teacher is not None
            cells = 2 * distillation.top_k
            if teacher.max_logprob_cells < cells:
                raise ValueError(
                    f"teacher.max_logprob_cells is {teacher.max_logprob_cells}, one position with"
                    f" distillation.top_k {distillation.top_k} may need {cells}: raise it"
                )
        self._sets_can_be_asked()
        self._schedule_fits(self.train.schedule)
        ppo = self.train.algorithm.estimator == "ppo"
        if ppo and self.critic is None:
            raise ValueError(
                "train.algorithm.estimator is ppo but the recipe has no critic section: add one,"
                " with as many ranks as train.ranks"
            )
        if ppo and self.reward.source == "none":
            raise ValueError("train.algorithm.estimator is ppo but reward.source is none: set one")
        if self.train.mini_batches > total:
            raise ValueError(
                f"train.mini_batches is {self.train.mini_batches} but a step has {total} samples:"
                " use fewer mini-batches"
            )
        return self

    def _sets_can_be_asked(self) -> None:
        tiny = self.rollout.model.startswith("tiny:")
        for each in self.evaluation.sets:
            if each.source is None and each.problems > self.data.held_out:
                raise ValueError(
                    f"evaluation set {each.name}: problems is {each.problems}, data.held_out is"
                    f" {self.data.held_out}: lower the former, or raise the latter"
                )
            if each.source is not None and tiny != (each.source == "tiny.sort4"):
                raise ValueError(
                    f"evaluation set {each.name}: source is {each.source}, whose problems"
                    f" {self.rollout.model} cannot read: choose another source"
                )

    def _schedule_fits(self, schedule: Schedule) -> None:
        end = schedule.decay_steps or self.steps
        if schedule.style != "constant" and schedule.warmup_steps >= end:
            raise ValueError(
                f"train.schedule.warmup_steps is {schedule.warmup_steps} but the learning rate is"
                f" to have fallen at step {end}: raise decay_steps, or warm up for fewer steps"
            )
        if schedule.min_learning_rate > self.train.learning_rate:
            raise ValueError(
                f"train.schedule.min_learning_rate {schedule.min_learning_rate:g} is above"
                f" train.learning_rate {self.train.learning_rate:g}"
            )

    def _judges_can_judge(self, genrm: GenRM) -> None:
        if (genrm.prompt is None) != (genrm.verdict is None):
            raise ValueError(
                "genrm.prompt and genrm.verdict belong together: give both, or neither to use the"
                " task's own"
            )
        if genrm.prompt is None:
            if self.judged and self.data.source != "tiny.sort4":
                raise ValueError(
                    f"data.source {self.data.source} has no prompt for a judge: write genrm.prompt"
                    " and genrm.verdict"
                )
        else:
            places = set(re.findall(r"\{(\w+)\}", genrm.prompt))
            if unknown := sorted(places - set(JUDGE_PLACES)):
                raise ValueError(
                    f"genrm.prompt has {{{unknown[0]}}}: it may show"
                    f" {', '.join(f'{{{place}}}' for place in JUDGE_PLACES)}"
                )
            if "response" not in places:
                raise ValueError("genrm.prompt must show the {response}")
        pattern = genrm.verdict.pattern if genrm.verdict else None
        if pattern is not None and self.reward.key not in re.compile(pattern).groupindex:
            raise ValueError(
                f"genrm.verdict.pattern has no group (?P<{self.reward.key}>...), which reward.key"
                " names"
            )
        judges = {genrm.model_id, *(model.model_id for model in genrm.extra_models)}
        weights = self.reward.combine.weights
        if self.reward.combine.rule == "weighted" and set(weights) != judges:
            raise ValueError(
                f"reward.combine.weights has {', '.join(sorted(weights)) or 'nobody'}, the judges"
                f" are {', '.join(sorted(judges))}"
            )

    @property
    def judged(self) -> bool:
        """Whether the GenRM takes part."""
        return self.reward.source == "genrm"

    @property
    def distilled(self) -> bool:
        """Whether the Teacher takes part."""
        return self.distillation is not None and self.distillation.coefficient > 0

    @property
    def student_top_k(self) -> int:
        """Likeliest tokens of each position that the policy's engines have to name; 0: none."""
        plan = self.distillation
        wanted = plan is not None and plan.mode in ("student_topk", "union")
        return plan.top_k if plan is not None and wanted and self.distilled else 0
