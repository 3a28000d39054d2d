"""A Qwen3 policy in Megatron-Core, from the ``config.json`` of its Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_infer.contracts.failures import PermanentError
from relax_infer.training.attention import CausalAttention


@dataclass(frozen=True)
class PolicyShape:
    """What of the model's config the trainer needs."""

    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    groups: int
    """Key-value heads."""
    head_width: int
    context: int
    """Longest sequence, tokens."""
    norm_eps: float
    rope_base: float
    tied: bool
    """Whether embedding and output layer are one tensor."""


def read_shape(folder: Path) -> PolicyShape:
    """Raises :class:`PermanentError` naming the file and the field that we cannot train."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PermanentError(
            f"Cannot read the policy's config {path}: {error}.",
            cure="rollout.model must be a Hugging Face folder that the trainer's host can read.",
        ) from error
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "architectures": (config.get("architectures"), (["Qwen3ForCausalLM"],)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (config.get("attention_bias", False), (False,)),
        "use_sliding_window": (config.get("use_sliding_window", False), (False,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
        "rope type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
    }
    for field, (value, values) in allowed.items():
        if value not in values:
            raise PermanentError(f"{path}: {field} is {value!r}; the trainer knows {values[0]!r}.")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return PolicyShape(
            vocabulary=int(config["vocab_size"]),
            hidden=hidden,
            mlp=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            groups=int(config.get("num_key_value_heads", heads)),
            head_width=int(config.get("head_dim") or hidden // heads),
            context=int(config["max_position_embeddings"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise PermanentError(f"{path} has no field {error}.") from error


def build_model(shape: PolicyShape, dtype: torch.dtype = torch.float32) -> GPTModel:
    """This rank's part of the model, uninitialised until weights are loaded.

    Needs Megatron's parallel state. Fusions are off: they are CUDA's alone, and the policy that
    is trained must be the policy that the engines serve.
    """
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer: Any = spec.submodules
    layer.self_attention.submodules.core_attention = CausalAttention
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=int(shape.rope_base),
    )
