"""The critic's updates: a value for each token (PPO)."""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from relax_infer.contracts.training import CriticSpec, TrainerSpec
from relax_infer.training.batch import Batch
from relax_infer.training.learner import Learner
from relax_infer.training.values import value_loss


class Critic(Learner):
    """The value model."""

    _sums = ("loss", "share", "tokens")

    def __init__(
        self, model: GPTModel, spec: TrainerSpec, device: torch.device, critic: CriticSpec
    ) -> None:
        super().__init__(model, spec, device, critic.learning_rate)
        self._clip = critic.value_clip

    def values(self, batch: Batch) -> torch.Tensor:
        """[samples, tokens] float32: what the critic expects of the rest of each response, at the
        position that predicts its next token."""
        return self._look(batch, ("values",))["values"]

    def update(self, batch: Batch, parts: Iterable[torch.Tensor], step: int) -> dict[str, float]:
        """See :meth:`_pass`; metrics of it."""
        done = self._pass(batch, parts, step)
        return {"critic_loss": done.loss, "critic_grad_norm": done.grad_norm}

    def _lost(self, batch: Batch, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        assert batch.old_values is not None
        assert batch.returns is not None
        loss = value_loss(output[..., 0], batch.old_values, batch.returns, self._clip)
        total = torch.where(batch.mask > 0, loss * batch.weights, 0.0).sum()
        share = batch.shares.sum().to(torch.int32)
        told = {"loss": total.detach(), "share": share, "tokens": batch.mask.sum()}
        return total, share, told

    def _told(
        self, batch: Batch, output: torch.Tensor, non_loss_data: bool = True
    ) -> dict[str, torch.Tensor]:
        return {"values": output[..., 0].cpu()}
