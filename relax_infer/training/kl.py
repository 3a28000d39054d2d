"""Estimates of the KL divergence between two policies from one sampled token. Pure torch."""

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """KL(policy, reference) at each token, nats, from the log-probs of the token that was sampled.

    With ``d = log_prob - reference_log_prob`` (Schulman 2020, "Approximating KL divergence",
    http://joschu.net/blog/kl-approx.html):

    - ``k1``: ``d``; unbiased, of either sign. As a loss its gradient is 0 in expectation, so it
      belongs into the reward.
    - ``k2``: ``d ** 2 / 2``; its gradient is that of the KL in expectation.
    - ``k3``: ``exp(-d) - 1 + d``; unbiased, never negative, of low variance (the one of GRPO,
      arXiv 2402.03300, equation 4).

    Args:
        log_probs, reference_log_probs: of one shape, any.

    Returns:
        Of that shape, with gradient to ``log_probs``.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference
