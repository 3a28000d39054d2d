"""A tiny random Qwen3 checkpoint, made without torch, and a group that serves it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*=?:#, yn>", *(f"<r{k}>" for k in range(24, 32)))
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 128, 4, 2, 16

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tensors(seed: int, config: Mapping[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 0.1).astype(np.float32)

    made = {
        "model.embed_tokens.weight": matrix(len(VOCABULARY), hidden),
        "lm_head.weight": matrix(len(VOCABULARY), hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        made |= {
            f"{name}.self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{name}.self_attn.q_norm.weight": np.ones(head, np.float32),
            f"{name}.self_attn.k_norm.weight": np.ones(head, np.float32),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
    return made


def make_checkpoint(folder: Path, seed: int, **sizes: int) -> Path:
    """Hugging Face folder with config, character tokenizer and weights; ``sizes`` are fields of the
    config."""
    config = {**CONFIG, **sizes}
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    save_file(tensors(seed, config), weights, metadata={"format": "pt"})
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: k for k, token in enumerate(VOCABULARY)},
            "unk_token": "<pad>",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}=",
            }
        )
    )
    return folder


def group_spec(folder: Path, **changes: Any) -> EngineGroupSpec:
    """One replica of ``folder/version-0``, with its store in ``folder/store``."""
    spec = EngineGroupSpec(
        run="r",
        role="rollout",
        model="policy",
        model_path=str(folder / "version-0"),
        weight_source="ACTOR",
        replicas=1,
        gpus_per_replica=1,
        offload="memory_saver",
        ray_gpu_fraction=0.2,
        placement_group="pool",
        bundles=(BundleBinding(bundle=0, node_id="n", node_ip="127.0.0.1", gpu_id=0),),
        device="cpu",
        launch_timeout=180,
        drain_timeout=90,
        store=f"file://{folder / 'store'}",
    )
    return spec.model_copy(update=changes)
