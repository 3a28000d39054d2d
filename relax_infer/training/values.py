"""The critic's loss, and how much it knows. Pure torch."""

import torch


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """``max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2) / 2`` of each token.

    A value is moved by at most ``clip`` in one pass towards its return (Schulman et al. 2015,
    arXiv 1506.02438; the clipped form: Engstrom et al. 2020, arXiv 2005.12729, section 3).

    Args:
        values: [samples, tokens], with gradient.
        old_values: of the critic before the pass.
        returns: what the values are to meet.
        clip: in units of reward.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """``1 - var(G - V) / var(G)`` over trained tokens: 1 for a critic that knows, 0 for one that
    guesses the mean; 0 where all returns are alike."""
    kept = mask > 0
    spread = returns[kept].var(correction=0)
    if spread == 0:
        return 0.0
    return float(1 - (returns[kept] - values[kept]).var(correction=0) / spread)
