"""A dense Qwen or Llama policy in Megatron-Core, from its Hugging Face ``config.json``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training.attention import CausalAttention, RMSNorm
from relax_infer.training.value_head import ValueHead


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
    qk_norm: bool
    """Whether queries and keys are normed."""
    qkv_bias: bool
    rope_factor: float | None = None
    """Of Llama 3's scaling of the rotary embedding; None: it is not scaled."""


_KNOWN = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's scaled rotary embedding takes for granted."""


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
    kind = rope.get("rope_type", rope.get("type", "default"))
    architecture = (config.get("architectures") or [None])[0]
    # Qwen2's config has no field for its biases; in the others it adds one to the output, too.
    allowed: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "architectures": (architecture, _KNOWN),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (config.get("attention_bias", False), (False,)),
        "mlp_bias": (config.get("mlp_bias", False), (False,)),
        "use_sliding_window": (config.get("use_sliding_window", False), (False,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
        "rope type": (kind, ("default", "llama3")),
    }
    if kind == "llama3":
        allowed |= {name: (rope.get(name), (value,)) for name, value in _LLAMA3.items()}
    for field, (value, values) in allowed.items():
        if value not in values:
            known = " or ".join(repr(each) for each in values)
            raise PermanentError(f"{path}: {field} is {value!r}; the trainer knows {known}.")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return PolicyShape(
            vocabulary=int(config["vocab_size"]),
            hidden=hidden,
            mlp=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            groups=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or hidden // heads),
            context=int(config["max_position_embeddings"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            qkv_bias=architecture == "Qwen2ForCausalLM",
            rope_factor=float(rope["factor"]) if kind == "llama3" else None,
        )
    except KeyError as error:
        raise PermanentError(f"{path} has no field {error}.") from error


def check_layout(shape: PolicyShape, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raises :class:`PermanentError`: the model cannot be spread over the ranks that way."""
    parts = {
        "train.tensor_parallel": (
            tensor_parallel,
            {
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.groups,
                "intermediate_size": shape.mlp,
                "vocab_size": shape.vocabulary,
            },
        ),
        "train.pipeline_parallel": (pipeline_parallel, {"num_hidden_layers": shape.layers}),
    }
    for field, (ranks, sizes) in parts.items():
        for name, size in sizes.items():
            if size % ranks:
                raise PermanentError(
                    f"The policy's {name} is {size}, which {field} {ranks} does not divide.",
                    cure=f"Set {field} to a divisor of it.",
                )


def build_model(shape: PolicyShape, spec: TrainerSpec, *, critic: bool = False) -> GPTModel:
    """This rank's part of the model, uninitialised until weights are loaded.

    ``critic``: with a value in place of logits, 0 everywhere at first.

    Needs Megatron's parallel state. Fusions are off: they are CUDA's alone, and the policy that
    is trained must be the policy that the engines serve.
    """
    dtype = torch.bfloat16 if spec.precision == "bf16" else torch.float32
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_width,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
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
        tensor_model_parallel_size=spec.tensor_parallel,
        pipeline_model_parallel_size=spec.pipeline_parallel,
        sequence_parallel=spec.sequence_parallel,
        # Micro-batches of a step differ in size; Megatron asks for a dispatcher that can do so
        # also where there are no experts.
        variable_seq_lengths=spec.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(shape, config),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied and not critic,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=int(shape.rope_base),
        rope_scaling=shape.rope_factor is not None,
        rope_scaling_factor=shape.rope_factor or 1.0,
    )
    _mark_shards(model)
    if critic and model.post_process:
        model.output_layer = ValueHead(config)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _mark_shards(model: GPTModel) -> None:
    """Which parameters each tensor parallel rank has a part of. Megatron writes it down only where
    it initialises them; the gradient norm counts the others once."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            dimension = 1 if isinstance(module, RowParallelLinear) else 0
            for name, parameter in module.named_parameters(recurse=False):
                marked = hasattr(parameter, "tensor_model_parallel")  # biases are, always
                if not marked and (name == "weight" or dimension == 0):
                    set_tensor_model_parallel_attributes(parameter, True, dimension, 1)


def _layers(shape: PolicyShape, config: TransformerConfig) -> Any:
    """What this stage's layers are made of: Megatron's own but for attention and norms."""
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer: Any = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    norm: Any = RMSNorm
    layers = [spec] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
