"""Entropy and log-probs of chosen tokens where the vocabulary is spread over ranks.

Tensor parallel rank ``r`` of ``n`` has the logits of tokens ``r * V/n`` to ``(r + 1) * V/n - 1``.
With ``group`` None the vocabulary is whole. Both functions have exact gradients and keep no copy of
the logits but the probabilities.
"""

from typing import Any, cast

import torch
import torch.distributed


def entropy(logits: torch.Tensor, group: Any = None) -> torch.Tensor:
    """``-sum_v p_v log p_v`` at each position, nats.

    Args:
        logits: [..., vocabulary / ranks], any float dtype.

    Returns:
        [...] float32.
    """
    return cast("torch.Tensor", _Entropy.apply(logits, group))


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Log-probs, nats, of the tokens ``ids`` at each position.

    Args:
        logits: [..., vocabulary / ranks], any float dtype.
        ids: [..., K] int64 of the whole vocabulary.

    Returns:
        [..., K] float32.
    """
    return cast("torch.Tensor", _LogProbsAt.apply(logits, ids, group))


def _log_sum(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """[..., 1] log of the sum of exponents over the whole vocabulary."""
    top = logits.amax(-1, keepdim=True)
    if group is not None:
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    total = (logits - top).exp().sum(-1, keepdim=True)
    return _summed(total, group).log() + top


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        torch.distributed.all_reduce(part, group=group)
    return part


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: Any) -> torch.Tensor:
        log_probs = logits.float() - _log_sum(logits.float(), group)
        probs = log_probs.exp()
        # A token of probability 0 adds nothing, though its log-prob is minus infinity.
        found = _summed(-torch.where(probs > 0, probs * log_probs, 0.0).sum(-1), group)
        ctx.save_for_backward(probs, found)
        ctx.dtype = logits.dtype
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        probs, found = ctx.saved_tensors
        log_probs = torch.where(probs > 0, probs, 1.0).log()
        slope = -probs * (log_probs + found[..., None])
        return (slope * grads[0][..., None]).to(ctx.dtype), None


class _LogProbsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, group: Any) -> torch.Tensor:
        here = logits.shape[-1]
        first = 0 if group is None else torch.distributed.get_rank(group) * here
        mine = (ids >= first) & (ids < first + here)
        local = (ids - first).clamp(0, here - 1)
        log_sum = _log_sum(logits.float(), group)
        chosen = torch.where(mine, logits.float().gather(-1, local), 0.0)
        ctx.save_for_backward((logits.float() - log_sum).exp(), local, mine)
        ctx.dtype = logits.dtype
        return _summed(chosen, group) - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        probs, local, mine = ctx.saved_tensors
        grad = grads[0]
        slope = -probs * grad.sum(-1, keepdim=True)
        slope = slope.scatter_add(-1, local, torch.where(mine, grad, 0.0))
        return slope.to(ctx.dtype), None, None
