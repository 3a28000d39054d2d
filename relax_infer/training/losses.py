"""The clipped policy-gradient loss. Pure torch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLoss:
    """Sums over the trained tokens of a micro-batch; divide by ``tokens`` of the mini-batch."""

    loss: torch.Tensor
    """Scalar with gradient."""
    tokens: torch.Tensor
    """Scalar, int32."""
    clipped: torch.Tensor
    """Tokens whose ratio was outside the clip range."""
    kl: torch.Tensor
    """Sum of rollout minus trainer log-prob."""


def clipped_loss(
    *,
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``, summed over tokens.

    ``ratio = exp(log_prob - rollout_log_prob)`` against the log-probs that the engine sampled with
    (GRPO: arXiv 2402.03300, equation 3). The upper bound may be higher than the lower ("clip
    higher"), and every token of the mini-batch weighs the same, whichever response it is in
    ("token-level loss"): DAPO, arXiv 2503.14476, sections 3.1 and 3.3.

    Args:
        log_probs, rollout_log_probs, advantages: [samples, tokens] float32.
        mask: [samples, tokens], 1 where a token is trained on.
    """
    ratio = torch.exp(log_probs - rollout_log_probs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    summed = (loss * mask).sum()
    with torch.no_grad():
        outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
        return TokenLoss(
            loss=summed,
            tokens=mask.sum().to(torch.int32),
            clipped=(outside * mask).sum(),
            kl=((rollout_log_probs - log_probs) * mask).sum(),
        )
