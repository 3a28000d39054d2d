"""What goes to and comes from the trainer group."""

from typing import Literal

from pydantic import Field

from relax_infer.contracts.algorithm import AlgorithmSpec, ScheduleSpec
from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import RESIDUAL_MEMORY, BundleBinding, ReleaseEvidence
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.fractions import GpuFraction
from relax_infer.contracts.refs import RunRef, WeightsRef

DistillationMode = Literal["student_sampled", "student_topk", "teacher_topk", "union"]
Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]


def trainer_actor_name(rank: int) -> str:
    """Ray's name of a trainer rank's actor, in the run's namespace."""
    return f"trainer.rank-{rank}"


class CriticSpec(Message):
    """The value model that the trainer's ranks train beside the policy."""

    learning_rate: float
    value_clip: float
    """A value is moved by at most this in one pass."""


class TrainerSpec(Message):
    """Everything that is needed to start and operate the trainer group, on any worker."""

    run: RunRef
    model_path: str
    """Hugging Face folder of the initial policy."""
    ranks: int
    placement_group: str
    bundles: tuple[BundleBinding, ...]
    ray_gpu_fraction: GpuFraction
    seed: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    """Global gradient norm."""
    clip_low: float
    clip_high: float
    """PPO ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    mini_batches: int
    advantage_eps: float
    """Added to the group's standard deviation."""
    use_reward: bool
    """GRPO advantage from the samples' rewards."""
    distillation: float
    """Coefficient of distillation; 0: none."""
    keep_checkpoints: int
    keep_weights: int | None = None
    """Newest exported weights that are kept; None: all."""
    keep_every: int = 0
    """Checkpoints and weights of every so many steps are kept for good; 0: none."""
    distillation_mode: DistillationMode = "student_sampled"
    divergence: Divergence = "reverse_kl"
    top_k: int = 0
    """Entries of each row of the modes over several tokens but union, whose rows say it."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    longest_response: int = 1
    """Tokens that a response may have."""
    precision: Literal["fp32", "bf16"] = "fp32"
    critic: CriticSpec | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    """ranks = tensor_parallel * pipeline_parallel * data parallel ranks."""
    sequence_parallel: bool = False
    packed: bool = False
    """Sequences are packed one after another instead of padded."""
    micro_batch_tokens: int = 16_384
    residual_memory: int = RESIDUAL_MEMORY
    """Bytes that may stay in use on each rank's GPU when the trainer has let go."""
    """Of one forward and backward pass of a rank, at most, padding included."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the trainer computes on; auto: CUDA where its host has it."""

    @property
    def distils_support(self) -> bool:
        """Whether a divergence over several tokens a position is part of the loss."""
        return self.distillation > 0 and self.distillation_mode != "student_sampled"

    @property
    def namespace(self) -> str:
        return f"relax-{self.run.run}"

    def actor_name(self, rank: int) -> str:
        return trainer_actor_name(rank)


class TrainerStatus(Message):
    """Where the trainer stands, from its ledger."""

    step: int
    """Last step in the ledger; 0: none yet."""
    resident: bool
    """Whether parameters and optimizer are on the training device."""
    fence: FenceToken | None
    """Highest token that the trainer has seen."""
    actor_pid: int | None = None
    """Process of the trainer on its host."""
    doubt: str | None = None
    """Why nobody can tell whether its device is free; None: ``resident`` says it."""


class TrainerOperation(Message):
    """Start, onload, offload or stop of the trainer group."""

    trainer: TrainerSpec
    operation_id: str
    fence: FenceToken


class TrainerReport(Message):
    status: TrainerStatus
    evidence: tuple[ReleaseEvidence, ...] = ()
    unreached: tuple[int, ...] = ()
    """Of a person's word: ranks that could not be asked, so that only the word stands for them."""


class TrainRequest(Message):
    """Train once on one committed partition."""

    trainer: TrainerSpec
    fence: FenceToken
    step: int
    partition: str
    keys: int
    """Rows that the partition must hold."""
    digest: str
    """Of the published rows, as `publish_batch` gave it; the trainer computes it again."""
    traceparent: str | None = None
    """W3C trace context of the activity that asks, for the spans of the trainer."""


class TrainResult(Message):
    """One ledger entry. The same step asked again returns the recorded entry."""

    step: int
    rows: int
    loss: float
    grad_norm: float
    clip_fraction: float
    policy_kl: float
    """Mean over trained tokens of rollout log-prob minus trainer log-prob."""
    logprob_gap: float
    """Mean absolute difference, before the update, between the engines' log-probs of the sampled
    tokens and the trainer's own."""
    tokens: int
    seconds: float
    weights: WeightsRef
    """The new weights, exported and durable."""
    repeated: bool = False
    """True when the ledger already had the step and nothing was trained."""
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def logprob_gap_max(self) -> float | None:
        """Largest such difference of a trained token; None where an older trainer told none."""
        return self.metrics.get("logprob_gap_max")
