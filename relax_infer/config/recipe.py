"""The recipe: everything that a run is, typed. Importable without torch, Ray or Temporal."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from relax_infer.config.autoscale import Autoscale
from relax_infer.config.data import Data
from relax_infer.config.environment import Environment
from relax_infer.config.evaluation import EvaluationPlan
from relax_infer.config.placed import (
    Cluster,
    Count,
    Critic,
    Engine,
    Positive,
    RolloutModel,
    Seconds,
    Section,
    Seed,
    ServerGroup,
    ShownName,
    TrainingGroup,
)
from relax_infer.config.rules import broken_rules
from relax_infer.config.scoring import Distillation, GenRM, Reward, Teacher
from relax_infer.config.training import Train

RULES = "rules"
"""Key of the validation context; False: parts that do not fit together are no error."""


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
    num_gpus: Count | None = None
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
    longest engine.launch_timeout, with train.weights.timeout and drain_deadline where they apply,
    if this is less."""
    reconcile_timeout: Seconds = 120.0
    """Seconds of automatic read-only reconcile before a person is asked."""
    residual_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 8.0
    """GiB of each GPU that may stay in use, beside what was in use before, when a role has let go:
    the device contexts of all roles that sleep on it. With more in use an engine's release is not
    believed."""


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

    name: ShownName
    """Shown in lists and reports."""
    seed: Seed = 0
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
    layout: Annotated[str, Field(max_length=1000)] | None = None
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
    def _parts_fit_together(self, info: ValidationInfo) -> "Recipe":
        rules = info.context is None or info.context.get(RULES, True)
        if rules and (broken := broken_rules(self)):
            raise ValueError("; ".join(str(violation) for violation in broken))
        return self

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
