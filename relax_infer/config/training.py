"""The recipe's update: algorithm, optimizer, layout of ranks, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from relax_infer.config.placed import Count, Positive, Section
from relax_infer.contracts.alarms import LogProbBound, Nats
from relax_infer.contracts.algorithm import AlgorithmSpec, ScheduleSpec
from relax_infer.contracts.fractions import GpuFraction
from relax_infer.contracts.weights import WeightTransport

Beta = Annotated[float, Field(ge=0, lt=1)]


class Algorithm(AlgorithmSpec, Section):
    """How rewards become advantages, and advantages a loss."""


class Schedule(ScheduleSpec, Section):
    """Learning rate over training steps: a linear warm-up to train.learning_rate, then style."""


class RecipeLogProbBound(LogProbBound, Section):
    """How far the engines' log-probs of the sampled tokens may be from the trainer's own, before
    the update. Past it the step's details, the progress line and the report warn. With stale
    samples the difference holds what the policy learned since, too."""

    mean: Nats = 0.1
    """Mean absolute difference over trained tokens, nats. 0: no bound."""


class Weights(WeightTransport, Section):
    """How new weights reach the policy's engines. Where a transport fails, the engines read the
    exported folder; an engine that is launched or rebuilt always does."""

    in_place: bool = True
    """Mode decoupled: the engines keep their memory while they take new weights; false: they let
    go first, and come back with them."""


class Train(Section):
    """One policy update per step."""

    ranks: Count = 1
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
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    """Of AdamW, at the top of its schedule."""
    schedule: Schedule = Schedule()
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Of AdamW, for matrices; norms and biases do not decay."""
    grad_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
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
    weights: Weights = Weights()
    ray_gpu_fraction: GpuFraction = 0.4
    """Share of a GPU that a trainer actor reserves with Ray."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept, with the weights of their steps as Hugging Face folders."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints and weights of every so many steps are kept for good; 0: of none."""
