"""The recipe: everything that a run is, typed. Importable without torch, Ray or Temporal."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scalar = str | int | float | bool | None


class Section(BaseModel):
    """A part of the recipe: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Cluster(Section):
    """The GPUs that all roles share in turn."""

    gpus: Positive
    """GPUs of the pool."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the engines and the trainer compute on; auto: cuda where the host has one."""
    bind_timeout: Seconds = 60.0
    """Seconds that Ray may take to place the pool."""


class Data(Section):
    """Where prompts come from."""

    source: Literal["tiny.sort4"] = "tiny.sort4"
    """Task: prompts, right answers and an exact checker."""
    held_out: Annotated[int, Field(ge=1, le=512)] = 512
    """Problems that are never trained on and serve evaluation."""


class Engine(Section):
    """How the engines of a role are run."""

    replicas: Positive = 1
    """Engines of this role."""
    gpus_per_replica: Positive = 1
    """GPUs of one engine (its tensor parallel size)."""
    ray_gpu_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of a GPU that an engine actor reserves with Ray in each bundle."""
    offload: Literal["memory_saver", "restart"] = "memory_saver"
    """How it lets go: SGLang's release and resume, or a confirmed stop and a later start."""
    python: str | None = None
    """Interpreter of the engine processes; empty: the worker's own."""
    server_args: dict[str, Scalar] = Field(default_factory=dict)
    """Further SGLang flags, without dashes; true is a bare flag."""
    launch_timeout: Seconds = 300.0
    """Seconds from launch to an answering engine."""
    drain_timeout: Seconds = 120.0
    """Seconds that requests may take to end once admission is closed."""
    health_timeout: Seconds = 60.0
    """Seconds without a sign of life after which an engine is given up and rebuilt."""


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
    engine: Engine = Engine()


class GenRM(Section):
    """A generative reward model that judges the samples."""

    model: str
    """Hugging Face folder, or ``tiny:genrm``."""
    model_id: str = "judge"
    """Name in the role's registry."""
    max_new_tokens: Positive = 2
    """Tokens of a verdict."""
    max_concurrency: Positive = 64
    """Requests in flight at once."""
    request_timeout: Seconds = 300.0
    """Seconds for one request."""
    engine: Engine = Engine()


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
    engine: Engine = Engine()


class Reward(Section):
    """Where a sample's reward comes from."""

    source: Literal["genrm", "exact", "random", "none"] = "genrm"
    """The GenRM's verdict, the task's own checker, a coin (a negative control), or no reward."""
    unfinished: float = 0.0
    """Reward of a response that hit its token limit: a rule of the task, not a failed score."""
    on_unscored: Literal["fail", "drop_group"] = "fail"
    """A score that could not be had fails the batch, or drops its group with the reason."""


class Distillation(Section):
    """On-policy distillation from the Teacher."""

    coefficient: Annotated[float, Field(ge=0)] = 1.0
    """Times (teacher - rollout log-prob) of each sampled token, added to its advantage."""


class Train(Section):
    """One policy update per step."""

    ranks: Annotated[int, Field(ge=1, le=1)] = 1
    """Trainer ranks. More than one comes with the training room."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    mini_batches: Positive = 2
    """Optimizer steps of one pass over the batch."""
    advantage_eps: Annotated[float, Field(gt=0)] = 1e-4
    """Added to a group's standard deviation of rewards."""
    ray_gpu_fraction: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Share of a GPU that a trainer actor reserves with Ray."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept."""


class EvaluationPlan(Section):
    """Greedy answers to the held-out problems."""

    every: Annotated[int, Field(ge=0)] = 5
    """Steps between evaluations, also before the first and after the last; 0: never."""


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


class Recipe(Section):
    """A whole run."""

    name: str
    """Shown in lists and reports."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of prompts, sampling of mini-batches and the tiny weak policy."""
    steps: Positive = 40
    """Training steps."""
    mode: Literal["defer"] = "defer"
    """All roles share the pool, one after another."""
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
    evaluation: EvaluationPlan = EvaluationPlan()
    lease: Lease = Lease()
    staging: Staging = Staging()

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "Recipe":
        if self.reward.source == "genrm" and self.genrm is None:
            raise ValueError(
                "reward.source is genrm but the recipe has no genrm section:"
                " add one, or set reward.source to exact"
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
        total = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.train.mini_batches > total:
            raise ValueError(
                f"train.mini_batches is {self.train.mini_batches} but a step has {total} samples:"
                " use fewer mini-batches"
            )
        return self

    @property
    def judged(self) -> bool:
        """Whether the GenRM takes part."""
        return self.reward.source == "genrm"

    @property
    def distilled(self) -> bool:
        """Whether the Teacher takes part."""
        return self.distillation is not None and self.distillation.coefficient > 0
