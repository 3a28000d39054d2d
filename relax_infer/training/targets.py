"""What a batch is trained towards: advantages, token weights, importance weights. Pure torch."""

from dataclasses import dataclass

import torch

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.advantages import (
    discounted_returns,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    token_advantages,
    token_rewards,
    whiten,
)
from relax_infer.training.batch import Batch
from relax_infer.training.kl import kl_estimate
from relax_infer.training.losses import aggregation_weights, importance_weights
from relax_infer.transfer.rows import PublishedRows


@dataclass(frozen=True)
class Before:
    """What the models say of the batch before the update, [samples, tokens] each."""

    log_probs: torch.Tensor
    """The trainer's own."""
    reference_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None


def with_targets(batch: Batch, rows: PublishedRows, spec: TrainerSpec, before: Before) -> Batch:
    """The batch with everything that the loss needs.

    Raises:
        PermanentError: the recipe learns from a channel that the rows do not have.
    """
    check_channels(rows, spec)
    algorithm = spec.algorithm
    trainer = before.log_probs * batch.mask
    old = trainer if algorithm.old_log_probs == "trainer" else batch.rollout_log_probs
    weights, shares = aggregation_weights(
        batch.mask, algorithm.loss_aggregation, spec.longest_response
    )
    batch = batch.with_(
        weights=weights,
        shares=shares,
        old_log_probs=old,
        reference_log_probs=before.reference_log_probs,
        importance=importance_weights(
            trainer_log_probs=trainer,
            rollout_log_probs=batch.rollout_log_probs,
            mask=batch.mask,
            correction=algorithm.importance,
            cap=algorithm.importance_cap,
        ),
    )
    estimated: torch.Tensor | None = None
    if spec.use_reward:
        estimated, returns = _estimated(batch, rows, spec, before.values)
        batch = batch.with_(returns=returns, old_values=before.values)
    sampled = spec.distillation > 0 and not spec.distils_support
    advantages = token_advantages(
        rollout_log_probs=batch.rollout_log_probs,
        mask=batch.mask,
        sample_advantages=estimated,
        teacher_log_probs=batch.teacher_log_probs if sampled else None,
        coefficient=spec.distillation,
    )
    return batch.with_(advantages=advantages)


def check_channels(rows: PublishedRows, spec: TrainerSpec) -> None:
    """Raises :class:`PermanentError`: the rows lack what the recipe learns from."""
    distils = spec.distillation > 0
    wanted = {
        "reward": spec.use_reward,
        "teacher_log_probs": distils,
        "opd_topk_token_ids": spec.distils_support,
        "opd_topk_teacher_log_probs": spec.distils_support,
        "opd_topk_ksz": spec.distils_support and spec.distillation_mode == "union",
    }
    missing = [name for name, needed in wanted.items() if needed and name not in rows.columns]
    if missing or not (spec.use_reward or distils):
        raise PermanentError(
            f"There is nothing to learn from: the rows have no {' and no '.join(missing)}."
            if missing
            else "There is nothing to learn from: neither reward nor distillation.",
            cure="The recipe and the published batch must agree.",
        )


def _estimated(
    batch: Batch, rows: PublishedRows, spec: TrainerSpec, values: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages of the rewards, [samples] or [samples, tokens]; and a critic's returns."""
    algorithm, mask = spec.algorithm, batch.mask
    rewards = torch.tensor(rows.scalar("reward"), dtype=torch.float32)
    groups = torch.tensor(rows.scalar("group"))
    penalty: torch.Tensor | None = None
    if algorithm.needs_reference and algorithm.kl_in == "reward":
        assert batch.reference_log_probs is not None
        penalty = kl_estimate(
            batch.old_log_probs, batch.reference_log_probs, algorithm.kl_estimator
        )
    # Of a whole response; a response without trained tokens keeps its reward in its group.
    totals = rewards
    if penalty is not None:
        totals = rewards - algorithm.kl_coefficient * (penalty * mask).sum(1)
    if algorithm.estimator == "grpo":
        normalise = algorithm.normalise_std
        return group_advantages(totals, groups, spec.advantage_eps, normalise_std=normalise), None
    if algorithm.estimator == "rloo":
        return leave_one_out_advantages(totals, groups), None
    if algorithm.estimator == "reinforce_plus_plus_baseline":
        centred = group_advantages(totals, groups, spec.advantage_eps, normalise_std=False)
        return whiten(centred[:, None] * mask, mask), None
    per_token = token_rewards(rewards, mask, kl=penalty, coefficient=algorithm.kl_coefficient)
    if algorithm.estimator == "reinforce_plus_plus":
        return whiten(discounted_returns(per_token, mask, algorithm.gamma), mask), None
    assert values is not None
    advantages, returns = generalised_advantages(
        per_token, values * mask, mask, algorithm.gamma, algorithm.gae_lambda
    )
    return whiten(advantages, mask), returns
