"""Advantages per response token. Pure torch."""

import torch


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, eps: float) -> torch.Tensor:
    """GRPO's advantage of each sample: its reward against its group's.

    ``(r - mean(group)) / (std(group) + eps)`` with the unbiased standard deviation
    (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; ``eps`` keeps a unanimous group at 0).

    Args:
        rewards: [samples] float32.
        groups: [samples] int64, the prompt that each sample answers.
        eps: added to the standard deviation.

    Returns:
        [samples] float32. A group of one sample has nothing to compare with: 0.
    """
    _, member, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(sizes), dtype=rewards.dtype)
    mean = zeros.scatter_add(0, member, rewards) / sizes
    centred = rewards - mean[member]
    variance = zeros.scatter_add(0, member, centred**2) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt()[member] + eps)


def token_advantages(
    *,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sample_advantages: torch.Tensor | None,
    teacher_log_probs: torch.Tensor | None,
    coefficient: float,
) -> torch.Tensor:
    """What each token's log-prob is pushed by.

    The sample's GRPO advantage on each of its tokens, plus, for on-policy distillation,
    ``coefficient * (teacher - rollout log-prob)`` of the sampled token: the one-sample estimate of
    the negative reverse KL to the Teacher as a per-token reward (Agarwal et al. 2023,
    arXiv 2306.13649; Lu et al. 2025, "On-Policy Distillation", thinkingmachines.ai).

    Args:
        rollout_log_probs, teacher_log_probs, mask: [samples, tokens]; 0 outside the response.
        sample_advantages: [samples], None where nothing is rewarded.
        teacher_log_probs: None without a Teacher.

    Returns:
        [samples, tokens] float32, 0 where the mask is 0.
    """
    advantages = torch.zeros_like(rollout_log_probs)
    if sample_advantages is not None:
        advantages = advantages + sample_advantages[:, None]
    if teacher_log_probs is not None:
        advantages = advantages + coefficient * (teacher_log_probs - rollout_log_probs)
    return advantages * mask
