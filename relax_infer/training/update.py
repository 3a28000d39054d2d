"""The policy's updates."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch
from relax_infer.training.learner import Learner
from relax_infer.training.objective import SUMS, next_entropy, next_log_probs, objective


@dataclass(frozen=True)
class UpdateStats:
    """Of the optimizer steps of one pass."""

    loss: float
    """Mean over optimizer steps of the aggregated loss."""
    grad_norm: float
    """Mean over optimizer steps, before clipping."""
    clip_fraction: float
    policy_kl: float
    tokens: int
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Means over trained tokens of what the algorithm has beside these."""


@dataclass(frozen=True)
class Looked:
    """What the model says of a batch, [samples, tokens] float32 on the host."""

    log_probs: torch.Tensor
    """Of each next token, nats."""
    entropy: torch.Tensor
    """Of the next token, nats."""


class PolicyLearner(Learner):
    """The policy."""

    _sums = SUMS

    def __init__(self, model: GPTModel, spec: TrainerSpec, device: torch.device) -> None:
        super().__init__(model, spec, device, spec.learning_rate)
        self._reference: dict[str, torch.Tensor] | None = None

    def remember_reference(self) -> None:
        """The weights of this moment are the frozen reference, on the host."""
        self._reference = {n: p.detach().cpu().clone() for n, p in self.model.named_parameters()}

    def look(self, batch: Batch) -> Looked:
        """Log-probs and entropies by the policy as it is, on every rank; no gradient."""
        found = self._look(batch, ("log_probs", "entropy"))
        return Looked(found["log_probs"], found["entropy"])

    def reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """[samples, tokens] by the frozen reference, whose weights take the policy's place."""
        assert self._reference is not None
        parameters = dict(self.model.named_parameters())
        policy = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
        try:
            _put(self._reference, parameters)
            return self.look(batch).log_probs
        finally:
            _put(policy, parameters)

    def update(self, batch: Batch, parts: Iterable[torch.Tensor], step: int) -> UpdateStats:
        """See :meth:`_pass`."""
        done = self._pass(batch, parts, step)
        tokens = done.sums["tokens"]
        return UpdateStats(
            loss=done.loss,
            grad_norm=done.grad_norm,
            clip_fraction=done.sums["clipped"] / tokens,
            policy_kl=done.sums["kl"] / tokens,
            tokens=int(tokens),
            learning_rate=done.learning_rate,
            metrics={name: done.sums[name] / tokens for name in self._told_beside()},
        )

    def _told_beside(self) -> list[str]:
        algorithm = self._spec.algorithm
        told = {
            "reference_kl": algorithm.needs_reference,
            "divergence": self._spec.distils_support,
        }
        return [name for name, wanted in told.items() if wanted]

    def _lost(self, batch: Batch, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        """Loss with gradient, the share that Megatron divides by, and what is told."""
        return objective(output, batch, self._spec)

    def _told(
        self, batch: Batch, output: torch.Tensor, non_loss_data: bool = True
    ) -> dict[str, torch.Tensor]:
        log_probs = next_log_probs(output, batch.labels).cpu()
        return {"log_probs": log_probs, "entropy": next_entropy(output).cpu()}


@torch.no_grad()
def _put(weights: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
