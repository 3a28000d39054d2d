"""The clipped policy-gradient loss of each token, and how tokens add up. Pure torch."""

from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Correction = Literal["none", "token", "sequence"]


@dataclass(frozen=True)
class PolicyLoss:
    """Of each token, not masked."""

    loss: torch.Tensor
    """With gradient."""
    clipped: torch.Tensor
    """bool: its ratio was outside the clip range."""


def policy_loss(
    *,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` of each token.

    ``ratio = exp(log_prob - old_log_prob)`` (PPO: arXiv 1707.06347, equation 7; GRPO:
    arXiv 2402.03300, equation 3). The upper bound may be higher than the lower ("clip higher":
    DAPO, arXiv 2503.14476, section 3.1). ``dual_clip``, above 1, bounds the loss of a token with a
    negative advantage at ``-dual_clip * A``, however far its ratio has risen (Ye et al. 2019,
    arXiv 1912.09729, equation 5).

    Args:
        log_probs, old_log_probs, advantages: of one shape, float32, nats.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        bounded = torch.minimum(loss, -dual_clip * advantages)
        loss = torch.where(advantages < 0, bounded, loss)
    with torch.no_grad():
        outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return PolicyLoss(loss, outside)


def aggregation_weights(
    mask: torch.Tensor, aggregation: Aggregation, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight of each token, and what the weighted sum over a mini-batch is divided by.

    - ``token_mean``: every token of the mini-batch weighs the same, whichever response it is in
      (DAPO, arXiv 2503.14476, section 3.3);
    - ``sequence_mean``: every response weighs the same: mean over its tokens, then over responses
      (GRPO, arXiv 2402.03300, equation 3);
    - ``sequence_sum``: sum over a response's tokens divided by the constant ``longest``, then mean
      over responses, so that length changes no token's weight (Dr. GRPO, arXiv 2503.20783).

    Args:
        mask: [samples, tokens].
        longest: tokens that a response may have.

    Returns:
        [samples, tokens] float32; and [samples] int32, the part of each sample in the divisor.
        A response without trained tokens has no part in it.
    """
    tokens = mask.sum(1)
    if aggregation == "token_mean":
        return mask, tokens.to(torch.int32)
    each = (tokens > 0).to(torch.int32)
    if aggregation == "sequence_mean":
        return mask / tokens.clamp(min=1)[:, None], each
    return mask / longest, each


def importance_weights(
    *,
    trainer_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    correction: Correction,
    cap: float,
) -> torch.Tensor:
    """Truncated importance sampling between the rollout engine and the trainer before its update.

    Samples come from the engine's policy, which is not the trainer's: other kernels, another
    precision, older weights. ``w = min(p_trainer / p_rollout, cap)`` multiplies the loss and has no
    gradient (Ionides 2008; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"). ``token``: of each token. ``sequence``: the product over the
    response's trained tokens, capped once, on each of them (unbiased before the cap, of more
    variance).

    Args:
        trainer_log_probs, rollout_log_probs, mask: [samples, tokens], nats.

    Returns:
        [samples, tokens] float32; 1 where the mask is 0.
    """
    if correction == "none":
        return torch.ones_like(mask)
    gap = (trainer_log_probs - rollout_log_probs) * mask
    if correction == "sequence":
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    # The cap is applied to the exponent: what it would cut off must not overflow first.
    bound = torch.tensor(cap, dtype=gap.dtype).log()
    return torch.where(mask > 0, gap.minimum(bound).exp(), 1.0)
