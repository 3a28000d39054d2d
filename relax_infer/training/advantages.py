"""Advantages from rewards. Pure torch; a masked token neither gets an advantage nor counts."""

import torch


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, eps: float, *, normalise_std: bool = True
) -> torch.Tensor:
    """GRPO's advantage of each sample: its reward against its group's.

    ``(r - mean(group)) / (std(group) + eps)`` with the unbiased standard deviation
    (Shao et al. 2024, arXiv 2402.03300, section 4.1.2; ``eps`` keeps a unanimous group at 0).
    Without ``normalise_std`` only ``r - mean(group)``, so that groups of which nearly all samples
    are alike weigh no more than others (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783).

    Args:
        rewards: [samples] float32.
        groups: [samples] int64, the prompt that each sample answers.
        eps: added to the standard deviation.

    Returns:
        [samples] float32. A group of one sample has nothing to compare with: 0.
    """
    centred, member, sizes = _centred(rewards, groups)
    if not normalise_std:
        return centred
    zeros = torch.zeros(len(sizes), dtype=rewards.dtype)
    variance = zeros.scatter_add(0, member, centred**2) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt()[member] + eps)


def leave_one_out_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """RLOO: each sample's reward less the mean of the others of its group.

    ``r - mean(group without it) = (r - mean(group)) * n / (n - 1)`` (Ahmadian et al. 2024,
    arXiv 2402.14740, section 3.3). Shapes as :func:`group_advantages`; a group of one gives 0.
    """
    centred, member, sizes = _centred(rewards, groups)
    return centred * (sizes / (sizes - 1).clamp(min=1))[member]


def token_rewards(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl: torch.Tensor | None = None,
    coefficient: float = 0.0,
) -> torch.Tensor:
    """The sample's reward at its last trained token, and the KL penalty at each of them.

    ``R_t = [t is the last] * r - coefficient * kl_t`` (Ouyang et al. 2022, arXiv 2203.02155).

    Args:
        rewards: [samples].
        mask: [samples, tokens].
        kl: [samples, tokens] nats, None without a penalty.
    """
    positions = torch.arange(mask.shape[1])
    last = torch.where(mask > 0, positions, -1).amax(1)
    ends = (positions == last[:, None]) & (mask > 0)
    given = torch.where(ends, rewards[:, None], 0.0)
    return given if kl is None else given - coefficient * kl * mask


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """What each token is followed by: ``G_t = R_t + gamma * G_{t+1}`` over trained tokens.

    The return of REINFORCE++ (Hu et al. 2025, arXiv 2501.03262). Shapes [samples, tokens].
    """
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for token in reversed(range(rewards.shape[1])):
        here = mask[:, token] > 0
        running = torch.where(here, rewards[:, token] + gamma * running, running)
        returns[:, token] = torch.where(here, running, 0.0)
    return returns


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE, and the returns that the values are to meet.

    ``delta_t = R_t + gamma * V_{t+1} - V_t``; ``A_t = delta_t + gamma * lam * A_{t+1}``; return
    ``A_t + V_t`` (Schulman et al. 2015, arXiv 1506.02438). After the last trained token the value
    is 0; tokens in between that are not trained on (a tool's, for instance) are passed over.

    Args:
        rewards, values, mask: [samples, tokens].

    Returns:
        Advantages and returns, [samples, tokens] each, 0 where the mask is 0.
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    running = torch.zeros_like(following)
    for token in reversed(range(rewards.shape[1])):
        here = mask[:, token] > 0
        delta = rewards[:, token] + gamma * following - values[:, token]
        running = torch.where(here, delta + gamma * lam * running, running)
        following = torch.where(here, values[:, token], following)
        advantages[:, token] = torch.where(here, running, 0.0)
    return advantages, (advantages + values) * (mask > 0)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over all trained tokens of the batch.

    With the unbiased variance plus 1e-8; without ``shift_mean`` the mean stays what it was.
    Shapes [samples, tokens]; 0 where the mask is 0.
    """
    count = mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    centred = (values - mean) * mask
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    scaled = centred * torch.rsqrt(variance + 1e-8)
    return scaled if shift_mean else scaled + mean * mask


def token_advantages(
    *,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sample_advantages: torch.Tensor | None,
    teacher_log_probs: torch.Tensor | None,
    coefficient: float,
) -> torch.Tensor:
    """What each token's log-prob is pushed by.

    The advantage that its reward gives, plus, for on-policy distillation from sampled tokens,
    ``coefficient * (teacher - rollout log-prob)`` of the sampled token: the one-sample estimate of
    the negative reverse KL to the Teacher as a per-token reward (Agarwal et al. 2023,
    arXiv 2306.13649; Lu et al. 2025, "On-Policy Distillation", thinkingmachines.ai).

    Args:
        rollout_log_probs, teacher_log_probs, mask: [samples, tokens]; 0 outside the response.
        sample_advantages: [samples] or [samples, tokens], None where nothing is rewarded.
        teacher_log_probs: None without a Teacher.

    Returns:
        [samples, tokens] float32, 0 where the mask is 0.
    """
    advantages = torch.zeros_like(rollout_log_probs)
    if sample_advantages is not None:
        per_token = sample_advantages.dim() == 2
        advantages = advantages + (sample_advantages if per_token else sample_advantages[:, None])
    if teacher_log_probs is not None:
        advantages = advantages + coefficient * (teacher_log_probs - rollout_log_probs)
    return advantages * mask


def _centred(
    rewards: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards less their group's mean, which group each is of, and the groups' sizes."""
    _, member, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(sizes), dtype=rewards.dtype).scatter_add(0, member, rewards) / sizes
    return rewards - mean[member], member, sizes
