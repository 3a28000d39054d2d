"""Causal attention and RMSNorm on PyTorch's own kernels.

Megatron's local attention would keep every score and refuses packed sequences; its local norm
refuses sequence parallelism.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class CausalAttention(MegatronModule):
    """Core attention of a layer. Padded sequences are padded on the right, so the causal mask is
    enough: no real token sees the padding, and padding is never trained on. Packed ones are
    attended to one by one."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[tokens, sequences, heads, width] in, [tokens, sequences, heads * width] out; packed:
        [tokens, heads, width] in, [tokens, heads * width] out."""
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        bounds: Any = packed_seq_params.cu_seqlens_q
        lengths = bounds.diff().tolist()
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        mixed = [self._attend(*(x.transpose(0, 1)[None] for x in part))[0] for part in parts]
        return torch.cat([each.transpose(0, 1) for each in mixed]).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[sequences, heads, tokens, width] each."""
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=True
        )


class RMSNorm(torch.nn.RMSNorm):
    """As Megatron builds norms."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each tensor parallel rank has seen a part of the tokens only: Megatron then adds the
        # gradients up.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
