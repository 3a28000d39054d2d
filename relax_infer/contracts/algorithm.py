"""The update's algorithm, as the recipe says it and the trainer carries it out."""

from typing import Annotated, Literal

from pydantic import Field

from relax_infer.contracts.base import Message

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class AlgorithmSpec(Message):
    """How rewards become advantages, and advantages a loss."""

    estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """Advantages. grpo: reward against the group's mean and standard deviation. rloo: against the
    mean of the group's others. reinforce_plus_plus: discounted returns, normalised over the batch.
    reinforce_plus_plus_baseline: reward against the group's mean, normalised over the batch. ppo:
    a critic's, by GAE."""
    normalise_std: bool = True
    """Estimator grpo: divide by the group's standard deviation; false: Dr. GRPO."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """token_mean: each token of a mini-batch weighs the same. sequence_mean: each response.
    sequence_sum: tokens of a response over the constant rollout.sampling.max_new_tokens, then the
    mean over responses."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """A token of negative advantage loses at most this times it. Empty: no bound."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a later token's reward: reinforce_plus_plus and ppo."""
    gae_lambda: Share = 1.0
    """Estimator ppo."""
    kl_coefficient: NotNegative = 0.0
    """Of the KL to the reference, the initial policy; 0: none is computed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """From the sampled token, d = log-prob less the reference's: d, d^2 / 2, or exp(-d) - 1 + d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss with its gradient, or taken from each token's reward."""
    entropy_coefficient: NotNegative = 0.0
    """Of the policy's entropy at each token, which the loss then favours."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """What the ratio is taken against: the log-probs that the engine sampled with, or those of the
    trainer before its update."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Truncated importance sampling, trainer before its update over rollout engine: weight of each
    token, or of each response. Needs old_log_probs trainer."""
    importance_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Largest weight."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0


class ScheduleSpec(Message):
    """Learning rate over training steps: a linear warm-up to train.learning_rate, then style."""

    style: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls to `min_learning_rate`; constant: it does not."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Training steps of the warm-up; the last of them has the whole learning rate."""
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """Training step at which `min_learning_rate` is reached, the warm-up included. Empty: the
    recipe's steps."""
    min_learning_rate: NotNegative = 0.0
    """Learning rate at the end and afterwards."""
