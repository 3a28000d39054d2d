"""The loss of one micro-batch from the model's logits, and what is told of it."""

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch
from relax_infer.training.distillation import support_divergence
from relax_infer.training.kl import kl_estimate
from relax_infer.training.losses import policy_loss
from relax_infer.training.vocabulary import entropy, log_probs_at

SUMS = ("loss", "share", "tokens", "clipped", "kl", "reference_kl", "divergence", "entropy")
"""Sums over a micro-batch: the weighted loss and its divisor; trained tokens; over them, tokens
outside the clip range, rollout less trainer log-prob, KL to the reference, divergence from the
Teacher and, where it is part of the loss, entropy."""


def objective(
    logits: torch.Tensor, batch: Batch, spec: TrainerSpec
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of

    ``importance * policy loss + kl * KL(policy, reference) + c * divergence - e * entropy``

    over tokens; the caller divides by the shares of the whole mini-batch.

    Args:
        logits: [samples, tokens, vocabulary / ranks].

    Returns:
        The sum, with gradient; the micro-batch's share, int32; and ``SUMS``.
    """
    algorithm = spec.algorithm
    log_probs = next_log_probs(logits, batch.labels)
    policy = policy_loss(
        log_probs=log_probs,
        old_log_probs=batch.old_log_probs,
        advantages=batch.advantages,
        clip_low=spec.clip_low,
        clip_high=spec.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    loss = batch.importance * policy.loss
    per_token = {
        "clipped": policy.clipped.to(loss.dtype),
        "kl": batch.rollout_log_probs - log_probs,
    }
    if batch.reference_log_probs is not None:
        kl = kl_estimate(log_probs, batch.reference_log_probs, algorithm.kl_estimator)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coefficient * kl
        per_token["reference_kl"] = kl
    if spec.distils_support:
        divergence = _divergence(logits, batch, spec)
        loss = loss + spec.distillation * divergence
        per_token["divergence"] = divergence
    if algorithm.entropy_coefficient > 0:
        spread = entropy(logits, _vocabulary_group())
        loss = loss - algorithm.entropy_coefficient * spread
        per_token["entropy"] = spread
    # A prompt's or a padding's logits may be anything: what is not trained on is left out, not
    # multiplied by 0.
    trained = batch.mask > 0
    total = torch.where(trained, loss * batch.weights, 0.0).sum()
    share = batch.shares.sum().to(torch.int32)
    told = {
        name: torch.where(trained, each.detach(), 0.0).sum() for name, each in per_token.items()
    }
    told |= {"loss": total.detach(), "share": share, "tokens": batch.mask.sum()}
    return total, share, told


def next_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[samples, tokens, vocabulary / ranks] and [samples, tokens] to [samples, tokens]."""
    # A copy of its own, also where one sequence is contiguous already: Megatron computes in place,
    # and others look at the logits after it.
    by_token = logits.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    losses = tensor_parallel.vocab_parallel_cross_entropy(by_token, labels.t().contiguous())
    return -losses.t()


def next_entropy(logits: torch.Tensor) -> torch.Tensor:
    """[samples, tokens] nats."""
    return entropy(logits, _vocabulary_group())


def _divergence(logits: torch.Tensor, batch: Batch, spec: TrainerSpec) -> torch.Tensor:
    assert batch.support_ids is not None
    assert batch.support_teacher is not None
    student = log_probs_at(logits, batch.support_ids.clamp(min=0), _vocabulary_group())
    present = batch.support_ids >= 0
    return support_divergence(student, batch.support_teacher, present, spec.divergence)


def _vocabulary_group() -> Any:
    group: Any = parallel_state.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None
