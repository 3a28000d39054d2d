"""Forward, backward and optimizer steps over one batch, by Megatron's own schedule."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from relax_infer.training.pieces import (
    micro_batches,
    packing,
    positions,
    put_together,
    share_of_rank,
    sum_over_ranks,
)


@dataclass(frozen=True)
class Pass:
    """Optimizer steps of one pass over a batch."""

    loss: float
    grad_norm: float
    learning_rate: float
    sums: dict[str, float]


class Learner:
    """A model under Megatron's data-parallel wrapper, and its optimizer."""

    _sums: tuple[str, ...]
    """What the loss of a micro-batch tells: loss, share, tokens and others."""

    def __init__(
        self, model: GPTModel, spec: TrainerSpec, device: torch.device, learning_rate: float
    ) -> None:
        self._spec, self._device, self._rate = spec, device, learning_rate
        self.beats = 0
        """Micro-batches that were begun; other threads may read it."""
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
                lr=learning_rate,
                min_lr=self._lowest_rate,
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
        self._host = HostCopy()

    @property
    def _lowest_rate(self) -> float:
        return min(self._spec.schedule.min_learning_rate, self._rate)

    def _look(self, batch: Batch, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """What :meth:`_told` tells, [samples, tokens] of the whole batch on every rank."""
        mine = share_of_rank(torch.arange(len(batch)))
        micro = micro_batches(batch, mine, self._spec)
        with torch.no_grad():
            told = self._run(micro, train=False)
        return put_together(batch, mine, micro, told, names, self._device)

    def _pass(self, batch: Batch, parts: Iterable[torch.Tensor], step: int) -> Pass:
        """One optimizer step for each of ``parts``, sample indices into ``batch``, with the
        learning rate of training step ``step``, counted from 1.

        Raises:
            PermanentError: a loss or gradient norm that is not finite; the model is spoilt then.
        """
        rate = self._set_learning_rate(step)
        losses: list[float] = []
        norms: list[float] = []
        sums: dict[str, float] = dict.fromkeys(self._sums, 0.0)
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
                    cure="Lower the learning rate; the batch's log-probs may be off, too.",
                )
            losses.append(loss)
            norms.append(grad_norm)
            sums = {name: sums[name] + told[name] for name in self._sums}
        return Pass(sum(losses) / len(losses), sum(norms) / len(norms), rate, sums)

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

    def _set_learning_rate(self, step: int) -> float:
        """A pure function of the step, so that nothing of it has to be kept in a checkpoint."""
        schedule, weight_decay = self._spec.schedule, self._spec.weight_decay
        # Megatron's own scheduler wants an end even where the rate is constant.
        end = max(schedule.decay_steps or 1, schedule.warmup_steps + 1)
        scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=self._rate,
            min_lr=self._lowest_rate,
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
        self.beats += 1
        batch = next(micro).to(self._device)
        logits = model(batch.ids, positions(batch), None, packed_seq_params=packing(batch))
        return logits, functools.partial(self._lost if train else self._told, batch)

    def _lost(self, batch: Batch, output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        """Loss with gradient, the share that Megatron divides by, and what is told."""
        raise NotImplementedError

    def _told(
        self, batch: Batch, output: torch.Tensor, non_loss_data: bool = True
    ) -> dict[str, torch.Tensor]:
        """What is asked for without training, in the shape of the micro-batch."""
        raise NotImplementedError

    def _total(self, told: list[dict[str, torch.Tensor]]) -> Mapping[str, float]:
        """Sums over micro-batches, data parallel ranks and stages."""
        missing = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = [sum((t[n].double() for t in told if n in t), missing) for n in self._sums]
        stacked = torch.stack(sums)
        sum_over_ranks(stacked)
        return dict(zip(self._sums, stacked.tolist(), strict=True))
