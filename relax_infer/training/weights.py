"""Names and layouts of weights: Hugging Face's Qwen2, Qwen3 and Llama, and Megatron-Core's GPT.

Megatron stacks q, k and v group by group (the query heads of a group, its key, its value) and gate
above up; tensor parallelism splits rows or columns. Dense models only. Both ways go tensor by
tensor: no rank ever holds more than its own part and one whole tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from relax_infer.contracts.failures import PermanentError
from relax_infer.training.model import PolicyShape
from relax_infer.training.value_head import ValueHead

Layout = Literal["whole", "rows", "columns", "qkv", "gate_up"]
"""How tensor parallel ranks share a tensor: a copy each; rows; columns; rows of groups; rows of
gate and rows of up."""


@dataclass(frozen=True)
class Mapped:
    """One Megatron parameter and the Hugging Face tensors that it is made of."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout


def mapping(model: GPTModel, shape: PolicyShape) -> list[Mapped]:
    """Every parameter of this rank's pipeline stage."""
    found: list[Mapped] = []

    def add(megatron: str, layout: Layout, *hugging_face: str) -> None:
        found.append(Mapped(megatron, hugging_face, layout))

    if model.pre_process:
        add("embedding.word_embeddings.weight", "rows", "model.embed_tokens.weight")
    layers: Any = model.decoder.layers
    for local, layer in enumerate(layers):
        here, there = f"decoder.layers.{local}", f"model.layers.{layer.layer_number - 1}"
        attention = f"{there}.self_attn"
        add(f"{here}.input_layernorm.weight", "whole", f"{there}.input_layernorm.weight")
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            add(
                f"{here}.self_attention.linear_qkv.{kind}",
                "qkv",
                *(f"{attention}.{part}_proj.{kind}" for part in "qkv"),
            )
        for part in "qk" if shape.qk_norm else "":
            add(
                f"{here}.self_attention.{part}_layernorm.weight",
                "whole",
                f"{attention}.{part}_norm.weight",
            )
        add(f"{here}.self_attention.linear_proj.weight", "columns", f"{attention}.o_proj.weight")
        add(f"{here}.pre_mlp_layernorm.weight", "whole", f"{there}.post_attention_layernorm.weight")
        add(
            f"{here}.mlp.linear_fc1.weight",
            "gate_up",
            f"{there}.mlp.gate_proj.weight",
            f"{there}.mlp.up_proj.weight",
        )
        add(f"{here}.mlp.linear_fc2.weight", "columns", f"{there}.mlp.down_proj.weight")
    if model.post_process:
        add("decoder.final_layernorm.weight", "whole", "model.norm.weight")
        if isinstance(model.output_layer, ValueHead):
            pass  # nothing in a policy's folder is like it
        elif not shape.tied:
            add("output_layer.weight", "rows", "lm_head.weight")
        elif not model.pre_process:
            add("output_layer.weight", "rows", "model.embed_tokens.weight")
    return found


def stack(layout: Layout, parts: list[torch.Tensor], shape: PolicyShape) -> torch.Tensor:
    """Hugging Face tensors → the whole Megatron tensor, before it is split over ranks."""
    if layout == "qkv":
        width = parts[0].shape[1:]  # none: a bias
        grouped = [part.reshape(shape.groups, -1, *width) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *width)
    return torch.cat(parts) if layout == "gate_up" else parts[0]


def unstack(layout: Layout, whole: torch.Tensor, shape: PolicyShape) -> list[torch.Tensor]:
    """The whole Megatron tensor → Hugging Face tensors; the inverse of :func:`stack`."""
    if layout == "qkv":
        width = whole.shape[1:]
        queries = shape.heads // shape.groups * shape.head_width
        grouped = whole.reshape(shape.groups, -1, *width)
        split = grouped.split([queries, shape.head_width, shape.head_width], dim=1)
        return [part.reshape(-1, *width) for part in split]
    return list(whole.chunk(2)) if layout == "gate_up" else [whole]


def shard(layout: Layout, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """One tensor parallel rank's part."""
    if layout == "whole":
        return whole
    if layout == "gate_up":
        return torch.cat([part.chunk(ranks)[rank] for part in whole.chunk(2)])
    return whole.chunk(ranks, dim=1 if layout == "columns" else 0)[rank]


def unshard(layout: Layout, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor from every rank's part; the inverse of :func:`shard`."""
    if layout == "whole":
        return parts[0]
    if layout == "gate_up":
        halves = [part.chunk(2) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(parts, dim=1 if layout == "columns" else 0)


@torch.no_grad()
def load_weights(model: GPTModel, shape: PolicyShape, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's parameters from Hugging Face tensors of any float dtype.

    Raises:
        PermanentError: a tensor is missing, of another shape, or has no place in the model.
    """
    parameters = dict(model.named_parameters())
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    mapped = mapping(model, shape)
    if model.post_process and isinstance(model.output_layer, ValueHead):
        parameters.pop("output_layer.weight").zero_()
    if (unfilled := parameters.keys() - {m.megatron for m in mapped}) and unfilled:
        raise PermanentError(f"The model has parameters without a source: {sorted(unfilled)}.")
    for entry in mapped:
        missing = [name for name in entry.hugging_face if name not in tensors]
        if missing:
            raise PermanentError(f"The checkpoint has no tensor {', '.join(missing)}.")
        parts = [tensors[name] for name in entry.hugging_face]
        mine = shard(entry.layout, stack(entry.layout, parts, shape), rank, ranks)
        parameter = parameters[entry.megatron]
        if mine.shape != parameter.shape:
            raise PermanentError(
                f"{entry.hugging_face[0]} makes a tensor of shape {list(mine.shape)}, config.json"
                f" asks for {list(parameter.shape)}."
            )
        parameter.copy_(mine)


@torch.no_grad()
def export_weights(model: GPTModel, shape: PolicyShape) -> Iterator[tuple[str, torch.Tensor]]:
    """This stage's weights by Hugging Face name, whole, one after another, in their own dtype.

    Every tensor parallel rank of the stage has to go through it; the first gets the tensors, the
    others none.
    """
    parameters = dict(model.named_parameters())
    for entry in mapping(model, shape):
        if entry.megatron == "output_layer.weight" and shape.tied:
            continue  # the first stage's embedding is the same tensor
        parts = _gathered(entry.layout, parameters[entry.megatron].detach())
        if parts is not None:
            whole = unshard(entry.layout, parts)
            yield from zip(entry.hugging_face, unstack(entry.layout, whole, shape), strict=True)


def _gathered(layout: Layout, mine: torch.Tensor) -> list[torch.Tensor] | None:
    """Every rank's part, on the first; None on the others."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() == 0
    if layout == "whole" or group.size() == 1:
        return [mine] if first else None
    parts = [torch.empty_like(mine) for _ in range(group.size())] if first else None
    torch.distributed.gather(mine.contiguous(), parts, group=group, group_dst=0)
    return parts
