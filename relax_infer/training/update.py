"""Forward, backward and optimizer steps over one batch, by Megatron's own schedule."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch
from relax_infer.training.host_copy import HostCopy
from relax_infer.training.objective import SUMS, next_entropy, next_log_probs, objective
from relax_infer.training.pieces import (
    micro_batches,
    packing,
    positions,
    put_together,
    share_of_rank,
    sum_over_ranks,
)


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


class Learner:
    """The model under Megatron's data-parallel wrapper, and its optimizer."""

    def __init__(self, model: GPTModel, spec: TrainerSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self.model = model
        half = spec.precision == "bf16"
        config: Any = model.config
        inner: Any = Float16Module(config, model) if half else model
        # Distributed also where one rank has it all: checkpoints then have one form, and another
        # number of ranks can go on from them.
        self._parallel = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            inner,
        )
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.learning_rate,
                min_lr=spec.schedule.min_learning_rate,
                adam_beta1=spec.betas[0],
                adam_beta2=spec.betas[1],
                adam_eps=1e-8,
                weight_decay=spec.weight_decay,
                clip_grad=spec.grad_clip,
                use_distributed_optimizer=True,
                bf16=half,
                params_dtype=torch.bfloat16 if half else torch.float32,
            ),
            [self._parallel],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self._parallel.no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        self._reference: dict[str, torch.Tensor] | None = None
        self._host = HostCopy()

    def remember_reference(self) -> None:
        """The weights of this moment are the frozen reference, on the host."""
        self._reference = {n: p.detach().cpu().clone() for n, p in self.model.named_parameters()}

    def look(self, batch: Batch) -> Looked:
        """Log-probs and entropies by the policy as it is, on every rank; no gradient."""
        mine = share_of_rank(torch.arange(len(batch)))
        micro = micro_batches(batch, mine, self._spec)
        with torch.no_grad():
            told = self._run(micro, train=False)
        names = ("log_probs", "entropy")
        found = put_together(batch, mine, micro, told, names, self._device)
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
        """One optimizer step for each of ``parts``, sample indices into ``batch``, with the
        learning rate of training step ``step``, counted from 1.

        Raises:
            PermanentError: a loss or gradient norm that is not finite; the model is spoilt then.
        """
        rate = self._set_learning_rate(step)
        steps: list[tuple[float, float]] = []
        sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        for part in parts:
            if not batch.mask[part].any():
                continue
            micro = micro_batches(batch, share_of_rank(part), self._spec)
            self._parallel.zero_grad_buffer()
            self.optimizer.zero_grad()
            told = self._total(self._run(micro, train=True))
            stepped: Any = self.optimizer.step()
            grad_norm = float(stepped[1])
            loss = told["loss"] / told["share"]
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise PermanentError(
                    f"The update broke down: loss {loss}, gradient norm {grad_norm}.",
                    cure="Lower train.learning_rate; the batch's log-probs may be off, too.",
                )
            steps.append((loss, grad_norm))
            sums = {name: sums[name] + told[name] for name in SUMS}
        tokens = sums["tokens"]
        return UpdateStats(
            loss=sum(loss for loss, _ in steps) / len(steps),
            grad_norm=sum(norm for _, norm in steps) / len(steps),
            clip_fraction=sums["clipped"] / tokens,
            policy_kl=sums["kl"] / tokens,
            tokens=int(tokens),
            learning_rate=rate,
            metrics={name: sums[name] / tokens for name in self._told_beside()},
        )

    def forget(self) -> None:
        """The optimizer is as new; the weights were set from elsewhere."""
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            each.optimizer.state.clear()
        self.optimizer.reload_model_params()

    def to_host(self) -> int:
        """Parameters, gradients and optimizer state leave the device; bytes that came free."""
        self._parallel.offload_grad_buffers()
        freed = self._host.leave(self._tensors())
        torch.cuda.empty_cache()
        return freed

    def to_device(self) -> None:
        """They are back; gradients are zero."""
        self._host.come_back()
        self._parallel.restore_grad_buffers()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._parallel.parameters()
        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in each.optimizer.param_groups:
                yield from group["params"]
            for state in each.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _told_beside(self) -> list[str]:
        algorithm = self._spec.algorithm
        told = {
            "reference_kl": algorithm.needs_reference,
            "divergence": self._spec.distils_support,
        }
        return [name for name, wanted in told.items() if wanted]

    def _set_learning_rate(self, step: int) -> float:
        """A pure function of the step, so that nothing of it has to be kept in a checkpoint."""
        schedule, weight_decay = self._spec.schedule, self._spec.weight_decay
        # Megatron's own scheduler wants an end even where the rate is constant.
        end = max(schedule.decay_steps or 1, schedule.warmup_steps + 1)
        scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=self._spec.learning_rate,
            min_lr=schedule.min_learning_rate,
            lr_warmup_steps=schedule.warmup_steps,
            lr_decay_steps=end,
            lr_decay_style=schedule.style,
            start_wd=weight_decay,
            end_wd=weight_decay,
            wd_incr_steps=end,
            wd_incr_style="constant",
        )
        scheduler.step(step)
        return float(self.optimizer.param_groups[0]["lr"])

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
        logits = model(batch.ids, positions(batch), None, packed_seq_params=packing(batch))
        return logits, functools.partial(self._lost if train else self._told, batch)

    def _lost(self, batch: Batch, logits: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        """Loss with gradient, the share that Megatron divides by, and what is told."""
        return objective(logits, batch, self._spec)

    def _told(
        self, batch: Batch, logits: torch.Tensor, non_loss_data: bool = True
    ) -> dict[str, torch.Tensor]:
        log_probs = next_log_probs(logits, batch.labels).cpu()
        return {"log_probs": log_probs, "entropy": next_entropy(logits).cpu()}

    def _total(self, told: list[dict[str, torch.Tensor]]) -> Mapping[str, float]:
        """Sums over micro-batches, data parallel ranks and stages."""
        missing = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = [sum((t[n].double() for t in told if n in t), missing) for n in SUMS]
        stacked = torch.stack(sums)
        sum_over_ranks(stacked)
        return dict(zip(SUMS, stacked.tolist(), strict=True))


@torch.no_grad()
def _put(weights: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
