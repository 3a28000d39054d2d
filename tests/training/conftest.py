"""A tiny policy on disk, and one thread in which Megatron runs."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.training import TrainerOperation, TrainerSpec

T = TypeVar("T")
MEGATRON_WARNS = [
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.distributed.* is deprecated:FutureWarning"),
]
"""What Megatron-Core warns of itself, and PyTorch of what Megatron-Core uses."""

InThread = Callable[[Callable[[], Any]], Any]

# Head width times heads is not the hidden size, and groups share keys: both are easy to get wrong.
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "float32",
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "vocab_size": 32,
}


# Each with what tells it from the others.
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "head_dim": 16,
        "use_sliding_window": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def write_model(
    folder: Path, *, tied: bool = False, seed: int = 0, architecture: str = "qwen3"
) -> Path:
    """A folder with random weights, norms too, and a file that stands for a tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = _CONFIG | _ARCHITECTURES[architecture] | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    hidden, mlp, heads, groups = 64, 96, 4, 2
    width = config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(32, hidden)}
    for layer in range(2):
        here = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (groups * width, hidden),
            "self_attn.v_proj": (groups * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        norms = {
            "self_attn.q_norm": width,
            "self_attn.k_norm": width,
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
        }
        if architecture != "qwen3":
            del norms["self_attn.q_norm"], norms["self_attn.k_norm"]
        if architecture == "qwen2":
            for part, count in zip("qkv", (heads, groups, groups), strict=True):
                tensors[f"{here}.self_attn.{part}_proj.bias"] = random(count * width)
        tensors |= {f"{here}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        tensors |= {f"{here}.{name}.weight": 1 + random(size) for name, size in norms.items()}
    tensors["model.norm.weight"] = 1 + random(hidden)
    if not tied:
        tensors["lm_head.weight"] = random(32, hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_spec(store: Path, model: Path, **changes: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(
        {
            "run": RunRef(run="run", store=store.as_uri()),
            "model_path": str(model),
            "ranks": 1,
            "placement_group": "pool",
            "bundles": (BundleBinding(bundle=0, node_id="n", node_ip="127.0.0.1", gpu_id=0),),
            "ray_gpu_fraction": 0.4,
            "seed": 3,
            "learning_rate": 1e-3,
            "betas": (0.9, 0.95),
            "weight_decay": 0.0,
            "grad_clip": 1.0,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "mini_batches": 2,
            "advantage_eps": 1e-4,
            "use_reward": True,
            "distillation": 1.0,
            "keep_checkpoints": 2,
            **changes,
        }
    )


def operation(
    spec: TrainerSpec, operation_id: str, counter: int = 1, grant: str = "grant"
) -> TrainerOperation:
    fence = FenceToken(counter=counter, grant_id=grant)
    return TrainerOperation(trainer=spec, operation_id=operation_id, fence=fence)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def spec(tmp_path: Path, model_folder: Path) -> TrainerSpec:
    return make_spec(tmp_path / "store", model_folder)


@pytest.fixture(scope="session")
def in_thread() -> Iterator[InThread]:
    """Runs a call in the thread that all Megatron tests share: on a CPU it is bound to one."""
    with ThreadPoolExecutor(1) as executor:
        yield lambda call: executor.submit(call).result()
