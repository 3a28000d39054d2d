"""What an engine's weights must hash to, computed from the files and not by the engine.

SGLang's ``/weights_checker`` hashes the tensors that are resident: per tensor the first 8 bytes
of SHA-256 over its bytes, then SHA-256 over the sorted names and those hashes
(``sglang/srt/utils/weight_checker.py`` 0.5.23, CPU tensors; CUDA tensors use another hash).
SGLang keeps q, k, v and gate, up as one tensor each, the parts stacked along the first dimension,
so the bytes of the stacked tensor are the bytes of its parts one after another.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from relax_infer.engines.host_tensors import HostTensor, host_tensors

_SUPPORTED = frozenset({"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"})
_STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64
_BUFFERS = ("rotary_emb.inv_freq",)


def expected_digest(folder: Path, dtype: str) -> str | None:
    """Digest that one engine on a CPU (no tensor parallelism) must report for this checkpoint.

    Equal digests prove that every byte of every tensor that the files hold is resident, under its
    right name and in the right place of a stacked tensor. They do not prove that the engine
    computes with them.

    Args:
        folder: Hugging Face folder of a Qwen3, Qwen2 or Llama model.
        dtype: the engine's: ``float32``, ``bfloat16`` or ``float16``.

    Returns:
        64 hex digits; None where the layout of the resident tensors is not known here (another
        architecture, a quantized checkpoint, a widening of the dtype): then only the replicas'
        digests can be compared with each other.
    """
    config = json.loads((folder / "config.json").read_text())
    if not _SUPPORTED.intersection(config.get("architectures") or ()):
        return None
    if config.get("quantization_config"):
        return None
    tensors = {tensor.name: tensor for tensor in host_tensors(folder)}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    hashes: dict[str, str] = {}
    for name, parts in _resident(tensors).items():
        hasher = hashlib.sha256()
        for part in parts:
            data = _converted(part, dtype)
            if data is None:
                return None
            hasher.update(data)
        if name.endswith(_VOCABULARY):
            hasher.update(_padding(parts[0], dtype))
        hashes[name] = hasher.digest()[:8].hex()
    return combined_digest(hashes)


def combined_digest(hashes: Mapping[str, str]) -> str:
    """SHA-256 over names and hashes in name order, as SGLang combines them."""
    hasher = hashlib.sha256()
    for name in sorted(hashes):
        hasher.update(name.encode())
        hasher.update(hashes[name].encode())
    return hasher.hexdigest()


def _resident(tensors: Mapping[str, HostTensor]) -> dict[str, list[HostTensor]]:
    resident: dict[str, list[HostTensor]] = {}
    for name in _without_buffers(tensors):
        match = _PART.search(name)
        if match is None:
            resident[name] = [tensors[name]]
            continue
        whole, parts = next((w, p) for w, p in _STACKED.items() if match[1] in p)
        joined = name.replace(match[1], whole)
        if joined not in resident:
            resident[joined] = [tensors[name.replace(match[1], part)] for part in parts]
    return resident


def _without_buffers(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith(_BUFFERS)]


def _converted(tensor: HostTensor, dtype: str) -> memoryview | bytes | None:
    have = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(tensor.dtype)
    if have == dtype:
        return tensor.data
    if have == "float32" and dtype == "float16":
        with np.errstate(over="ignore"):
            return np.frombuffer(tensor.data, dtype=np.float32).astype(np.float16).tobytes()
    if have == "float32" and dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, dtype=np.uint32)
        half, one = np.uint32(0x7FFF), np.uint32(1)
        # Round to the nearest, ties to even.
        rounded = (bits + half + ((bits >> np.uint32(16)) & one)) >> np.uint32(16)
        return rounded.astype(np.uint16).tobytes()
    return None


def _padding(tensor: HostTensor, dtype: str) -> bytes:
    rows = -tensor.shape[0] % _VOCABULARY_MULTIPLE
    return bytes(rows * tensor.shape[1] * (4 if dtype == "float32" else 2))


def checkpoint_dtype(folder: Path) -> str:
    """The dtype that a Hugging Face folder declares, ``float32`` where it declares none."""
    config = json.loads((folder / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")
