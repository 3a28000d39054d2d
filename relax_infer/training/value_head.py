"""One value for each token, from its hidden state."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(MegatronModule):
    """In the place of a GPT model's output layer. Every tensor parallel rank has all of it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        # Each rank has seen a part of the tokens only: Megatron then adds the gradients up.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[tokens, sequences, hidden] to [tokens, sequences, 1] float32."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
