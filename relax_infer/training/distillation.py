"""On-policy distillation over several tokens of each position. Pure torch.

Which tokens, says ``distillation.mode``: the policy's likeliest, the Teacher's, or both. Of the
sampled token alone (``student_sampled``) there is no divergence to compute; it is a reward, see
:func:`relax_infer.training.advantages.token_advantages`.
"""

from typing import Literal

import torch

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]

_SMALLEST = 1e-6
"""Probability that the tokens outside the support have at least; float32 knows 1 to 6e-8."""


def support_divergence(
    student_log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    present: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    """Divergence between policy and Teacher at each position, nats, over K tokens and the rest.

    All tokens outside the support are one event of probability ``1 - sum(p)``. So it is the
    divergence of two distributions: never negative, 0 where they agree on the support, and at most
    that over the whole vocabulary (data processing). Leaving the rest out would reward a policy for
    leaving the support.

    ``reverse_kl``: ``sum p_s (log p_s - log p_t)``, mode seeking, the usual one on policy;
    ``forward_kl``: ``sum p_t (log p_t - log p_s)``, mass covering; ``jensen_shannon``: the mean of
    both against ``(p_s + p_t) / 2`` (Agarwal et al. 2023, arXiv 2306.13649, section 3; Gu et al.
    2023, arXiv 2306.08543).

    Args:
        student_log_probs: [..., K], with gradient.
        teacher_log_probs: [..., K].
        present: [..., K] bool; false: an entry that fills a shorter row.

    Returns:
        [...] float32. 0 where no entry is present.
    """
    student = _with_rest(student_log_probs, present)
    teacher = _with_rest(teacher_log_probs, present)
    if divergence == "reverse_kl":
        found = _kl(student, teacher)
    elif divergence == "forward_kl":
        found = _kl(teacher, student)
    else:
        middle = torch.logaddexp(student, teacher) - torch.tensor(2.0).log()
        found = (_kl(student, middle) + _kl(teacher, middle)) / 2
    return torch.where(present.any(-1), found, 0.0)


_ABSENT = -1e4
"""Log-prob of an entry that is not there: its probability is 0 and 0 * it is 0."""


def _with_rest(log_probs: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[..., K + 1]: the last is of all other tokens."""
    known = torch.where(present, log_probs, _ABSENT)
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST).log()
    return torch.cat([known, rest], -1)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum(-1)
