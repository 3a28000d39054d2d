"""Forward, backward and optimizer steps over one batch, by Megatron's own schedule."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch
from relax_infer.training.losses import clipped_loss

_SUMS = ("loss", "tokens", "clipped", "kl")


@dataclass(frozen=True)
class UpdateStats:
    """Of the optimizer steps of one pass."""

    loss: float
    """Mean over optimizer steps of the token-mean loss."""
    grad_norm: float
    """Mean over optimizer steps, before clipping."""
    clip_fraction: float
    policy_kl: float
    tokens: int


class Learner:
    """The model under Megatron's data-parallel wrapper, and its optimizer."""

    def __init__(self, model: GPTModel, spec: TrainerSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self.model = model
        self._parallel = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.learning_rate,
                adam_beta1=spec.betas[0],
                adam_beta2=spec.betas[1],
                adam_eps=1e-8,
                weight_decay=spec.weight_decay,
                clip_grad=spec.grad_clip,
                params_dtype=torch.float32,
            ),
            [self._parallel],
        )
        config: Any = model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self._parallel.no_sync
        config.grad_scale_func = self.optimizer.scale_loss

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """The model's log-prob of each next token, [samples, tokens] on the host; no gradient."""
        micro = batch.micro_batches()
        with torch.no_grad():
            parts = self._run(micro, train=False)
        return torch.cat([part["log_probs"] for part in parts])

    def update(self, batch: Batch, parts: Iterable[torch.Tensor]) -> UpdateStats:
        """One optimizer step for each of ``parts``, sample indices into ``batch``.

        Raises:
            PermanentError: a loss or gradient norm that is not finite; the model is spoilt then.
        """
        steps: list[tuple[float, float]] = []
        sums = dict.fromkeys(_SUMS, 0.0)
        for part in parts:
            mini_batch = batch.select(_of_this_rank(part))
            if not mini_batch.mask.any():
                continue
            self._parallel.zero_grad_buffer()
            self.optimizer.zero_grad()
            told = _total(self._run(mini_batch.micro_batches(), train=True))
            stepped: Any = self.optimizer.step()
            grad_norm = float(stepped[1])
            loss = told["loss"] / told["tokens"]
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise PermanentError(
                    f"The update broke down: loss {loss}, gradient norm {grad_norm}.",
                    cure="Lower train.learning_rate; the batch's log-probs may be off, too.",
                )
            steps.append((loss, grad_norm))
            sums = {name: sums[name] + told[name] for name in _SUMS}
        tokens = sums["tokens"]
        return UpdateStats(
            loss=sum(loss for loss, _ in steps) / len(steps),
            grad_norm=sum(norm for _, norm in steps) / len(steps),
            clip_fraction=sums["clipped"] / tokens,
            policy_kl=sums["kl"] / tokens,
            tokens=int(tokens),
        )

    def forget(self) -> None:
        """The optimizer is as new; the weights were set from elsewhere."""
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            each.optimizer.state.clear()
        self.optimizer.reload_model_params()

    def to_host(self) -> None:
        """Parameters, gradients and optimizer state leave the device."""
        self._parallel.offload_grad_buffers()
        self.optimizer.offload_to_cpu()

    def to_device(self) -> None:
        """They are back; gradients are zero."""
        self.optimizer.restore_from_cpu()
        self._parallel.restore_grad_buffers()

    def _run(self, micro: list[Batch], *, train: bool) -> list[dict[str, torch.Tensor]]:
        """One pass over micro-batches; what the last pipeline stage told of each."""
        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=functools.partial(self._forward, train=train),
            data_iterator=iter(micro),
            model=[self._parallel],
            num_microbatches=len(micro),
            seq_length=micro[0].ids.shape[1],
            micro_batch_size=len(micro[0]),
            forward_only=not train,
            collect_non_loss_data=not train,
        )

    def _forward(self, micro: Iterator[Batch], model: Any, *, train: bool) -> tuple[Any, Any]:
        batch = next(micro).to(self._device)
        positions = torch.arange(batch.ids.shape[1], device=self._device).expand_as(batch.ids)
        logits = model(batch.ids, positions, None)
        return logits, functools.partial(self._lost if train else self._told, batch)

    def _lost(self, batch: Batch, logits: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        """Loss with gradient, tokens that Megatron divides by, and what is told."""
        told = clipped_loss(
            log_probs=_next_log_probs(logits, batch.labels),
            rollout_log_probs=batch.rollout_log_probs,
            advantages=batch.advantages,
            mask=batch.mask,
            clip_low=self._spec.clip_low,
            clip_high=self._spec.clip_high,
        )
        sums = {"loss": told.loss.detach(), "tokens": told.tokens}
        return told.loss, told.tokens, sums | {"clipped": told.clipped, "kl": told.kl}

    def _told(
        self, batch: Batch, logits: torch.Tensor, non_loss_data: bool = True
    ) -> dict[str, torch.Tensor]:
        return {"log_probs": _next_log_probs(logits, batch.labels).cpu()}


def _next_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[samples, tokens, vocabulary / ranks] and [samples, tokens] to [samples, tokens]."""
    by_token = logits.transpose(0, 1).contiguous()
    losses = tensor_parallel.vocab_parallel_cross_entropy(by_token, labels.t().contiguous())
    return -losses.t()


def _of_this_rank(part: torch.Tensor) -> torch.Tensor:
    """Data parallel ranks share a mini-batch in turn."""
    rank = parallel_state.get_data_parallel_rank()
    return part[rank :: parallel_state.get_data_parallel_world_size()]


def _total(told: list[dict[str, torch.Tensor]]) -> Mapping[str, float]:
    """Sums over micro-batches and data parallel ranks."""
    stacked = torch.stack(
        [torch.stack([each[name].to(torch.float64) for each in told]).sum() for name in _SUMS]
    )
    torch.distributed.all_reduce(stacked, group=parallel_state.get_data_parallel_group())
    return dict(zip(_SUMS, stacked.tolist(), strict=True))
