"""The micro-batches of one rank, and what all ranks found put together again."""

from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.batch import Batch


def share_of_rank(part: torch.Tensor) -> torch.Tensor:
    """Data parallel ranks share sample indices in turn."""
    rank = parallel_state.get_data_parallel_rank()
    return part[rank :: parallel_state.get_data_parallel_world_size()]


def micro_batches(batch: Batch, mine: torch.Tensor, spec: TrainerSpec) -> list[Batch]:
    """Of the samples ``mine``. A rank without any goes along with one that counts for nothing."""
    own = batch.select(mine) if len(mine) else _silent(batch.select(torch.tensor([0])))
    multiple = spec.tensor_parallel if spec.sequence_parallel else 1
    if not spec.packed:
        own = own.padded_to(multiple)
    return own.micro_batches(spec.micro_batch_tokens, packed=spec.packed, multiple=multiple)


def packing(micro: Batch) -> PackedSeqParams | None:
    """Where the sequences of a packed micro-batch begin and end."""
    if not micro.packed:
        return None
    bounds = torch.cat([micro.lengths.new_zeros(1), micro.lengths.cumsum(0)]).to(torch.int32)
    longest = int(micro.lengths.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,  # pyright: ignore[reportArgumentType]
        max_seqlen_kv=longest,  # pyright: ignore[reportArgumentType]
    )


def positions(micro: Batch) -> torch.Tensor:
    """Of each token in its sequence, in the shape of the ids."""
    if not micro.packed:
        return torch.arange(micro.ids.shape[1], device=micro.ids.device).expand_as(micro.ids)
    starts = micro.lengths.cumsum(0) - micro.lengths
    return (
        torch.arange(micro.ids.shape[1], device=micro.ids.device)
        - starts.repeat_interleave(micro.lengths)
    )[None]


def put_together(
    batch: Batch,
    mine: torch.Tensor,
    micro: list[Batch],
    told: list[dict[str, torch.Tensor]],
    names: tuple[str, ...],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """What each micro-batch of each rank told of its tokens, as [samples, tokens] on the host.

    Args:
        told: in the order of this rank's micro-batches; empty where it is not the last stage.
    """
    whole = torch.zeros(len(names), *batch.ids.shape)
    if told and len(mine):
        own = batch.select(mine)
        for number, name in enumerate(names):
            parts = [each[name].float().cpu() for each in told]
            whole[number, mine] = _by_sample(own, micro, parts)
    everywhere = whole.to(device)
    sum_over_ranks(everywhere)
    return dict(zip(names, everywhere.cpu(), strict=True))


def sum_over_ranks(tensor: torch.Tensor) -> None:
    """Over data parallel ranks and stages, in place. What tensor parallel ranks have is alike."""
    groups: tuple[Any, ...] = (
        parallel_state.get_data_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    for group in groups:
        if group.size() > 1:
            torch.distributed.all_reduce(tensor, group=group)


def _by_sample(own: Batch, micro: list[Batch], parts: list[torch.Tensor]) -> torch.Tensor:
    """[samples, tokens] of what was told of each micro-batch."""
    width = own.ids.shape[1]
    if not micro[0].packed:
        return torch.cat([part[:, :width] for part in parts])
    # A pack's padding is a sequence more than it has samples.
    kept = [int(m.lengths[: len(m.shares)].sum()) for m in micro]
    flat = torch.cat([part[0, :size] for part, size in zip(parts, kept, strict=True)])
    found = torch.zeros(len(own), width)
    found[torch.arange(width) < own.lengths[:, None]] = flat
    return found


def _silent(batch: Batch) -> Batch:
    nothing = torch.zeros_like(batch.mask)
    return batch.with_(mask=nothing, weights=nothing, shares=torch.zeros_like(batch.shares))
