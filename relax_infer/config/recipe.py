"""The recipe: everything that a run is, typed. Importable without torch, Ray or Temporal."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax_infer.config.autoscale import Autoscale
from relax_infer.config.data import Data
from relax_infer.config.environment import Environment
from relax_infer.config.evaluation import EvaluationPlan
from relax_infer.config.placed import (
    Cluster,
    Critic,
    Engine,
    Positive,
    RolloutModel,
    Seconds,
    Section,
    ServerGroup,
    TrainingGroup,
)
from relax_infer.config.scoring import JUDGE_PLACES, Distillation, GenRM, Reward, Teacher
from relax_infer.config.training import Schedule, Train


class Sampling(Section):
    """How the policy samples."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus."""
    max_new_tokens: Positive = 1024
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
    environment: Environment | None = None
    """What answers the policy between its turns. Empty: a response is one answer to its prompt."""
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


class Lease(Section):
    """How long a role may take to hand over its GPUs."""

    operation_timeout: Seconds = 180.0
    """Seconds after which an unanswered onload or offload blocks the lease; a minute more than the
    longest engine.launch_timeout, with train.weights.timeout where that applies, if this is
    less."""
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
    keep_steps: Positive | None = None
    """Newest trained steps whose samples are kept; of older ones the record alone. Empty: all."""


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
    autoscale: Autoscale | None = None
    """Empty: replicas come and go when somebody asks (`relax-infer scale`)."""
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
        for role, section in (("genrm", self.genrm), ("teacher", self.teacher)):
            if section is not None and section.url is not None and section.extra_models:
                raise ValueError(
                    f"{role}.url is set, so {role}.extra_models would have no engines: remove one"
                )
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
        tiny = self.data.source == "tiny.sort4"
        if not tiny and self.rollout.model.startswith("tiny:"):
            raise ValueError(
                f"data.source is {self.data.source} but rollout.model is {self.rollout.model}: the"
                " tiny models know 22 characters and no words; name a folder with a policy and its"
                " tokenizer"
            )
        if self.data.config and not gym:
            raise ValueError(
                "data.config is for reasoning_gym.<dataset>, data.source is"
                f" {self.data.source}: remove it"
            )
        if self.data.system_prompt is not None and tiny:
            raise ValueError("data.system_prompt is not for data.source tiny.sort4: remove it")
        if self.reward.source in ("exact", "math_verify") and not self.data.answer_field:
            raise ValueError(
                f"reward.source is {self.reward.source} but data.answer_field is empty: name the"
                " field with the right answers"
            )
        if self.reward.source == "environment" and self.rollout.environment is None:
            raise ValueError(
                "reward.source is environment but rollout has no environment section: add one, or"
                " set another reward.source"
            )
        if self.rollout.environment is not None and self.student_top_k:
            raise ValueError(
                f"rollout.environment cannot be had with distillation.mode"
                f" {self.distillation.mode if self.distillation else ''}: the policy's likeliest"
                " tokens are not known where the environment speaks; use student_sampled or"
                " teacher_topk"
            )
        total = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if total > self.staging.max_samples:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.samples_per_prompt is {total} samples a step,"
                f" staging.max_samples is {self.staging.max_samples}: lower the former, or raise"
                " the limit if memory and store allow"
            )
        limit, most = "rollout.sampling.max_new_tokens", self.rollout.sampling.max_new_tokens
        if self.rollout.environment is not None:
            limit = "rollout.environment.max_response_tokens"
            most = self.rollout.environment.max_response_tokens
        tokens = total * most
        if tokens > self.staging.max_tokens:
            raise ValueError(
                f"{total} samples x {limit} is {tokens} tokens a step,"
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

    def serves(self, role: str) -> bool:
        """Whether a scorer, genrm or teacher, takes part with engines of ours."""
        takes_part = self.judged if role == "genrm" else self.distilled
        section = self.genrm if role == "genrm" else self.teacher
        return takes_part and section is not None and section.url is None

    @property
    def student_top_k(self) -> int:
        """Likeliest tokens of each position that the policy's engines have to name; 0: none."""
        plan = self.distillation
        wanted = plan is not None and plan.mode in ("student_topk", "union")
        return plan.top_k if plan is not None and wanted and self.distilled else 0
