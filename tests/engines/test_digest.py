"""Digest of the resident weights from the files, beside a plain computation of the same.

That SGLang itself reports it is shown in ``test_real_engine.py``.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relax_infer.engines.digest import checkpoint_dtype, combined_digest, expected_digest
from tests.engines.checkpoints import CONFIG, LAYERS, make_checkpoint


def plain(folder: Path, dtype: type) -> str:
    """The resident tensors built with numpy: stacked, padded, cast, hashed."""
    files = load_file(folder / "model.safetensors")
    resident: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        resident[f"{attention}qkv_proj.weight"] = np.concatenate(
            [files.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        )
        resident[f"{mlp}gate_up_proj.weight"] = np.concatenate(
            [files.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        resident[name] = np.pad(files.pop(name), ((0, 32), (0, 0)))
    resident |= files
    return combined_digest(
        {
            name: hashlib.sha256(tensor.astype(dtype).tobytes()).hexdigest()[:16]
            for name, tensor in resident.items()
        }
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("digest") / "m", seed=0)


@pytest.mark.parametrize(("name", "dtype"), [("float32", np.float32), ("float16", np.float16)])
def test_it_is_that_of_the_stacked_padded_and_cast_tensors(checkpoint, name, dtype):
    assert expected_digest(checkpoint, name) == plain(checkpoint, dtype)


def test_bfloat16_rounds_to_the_nearest_even(tmp_path: Path):
    def folder(name: str, values: list[float]) -> Path:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(CONFIG))
        save_file({"model.norm.weight": np.array(values, np.float32)}, made / "w.safetensors")
        return made

    step = 2.0**-7  # between neighbours of bfloat16 from 1 on
    halves = folder("a", [1 + step / 2, 1 + step * 1.5, 1 + step * 0.51, -1 - step / 2])
    rounded = folder("b", [1, 1 + step * 2, 1 + step, -1])
    assert expected_digest(halves, "bfloat16") == expected_digest(rounded, "bfloat16")
    assert expected_digest(halves, "float32") != expected_digest(rounded, "float32")


def test_one_changed_bit_or_two_swapped_tensors_change_it(checkpoint, tmp_path: Path):
    whole = load_file(checkpoint / "model.safetensors")
    before = expected_digest(checkpoint, "float32")
    k, v = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")
    bit = whole[v].copy()
    bit.view(np.uint32)[3, 5] ^= 1
    for number, changed in enumerate(({v: bit}, {k: whole[v], v: whole[k]})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file({**whole, **changed}, folder / "model.safetensors")
        assert expected_digest(folder, "float32") != before


def test_shards_in_several_files_make_the_same_digest(checkpoint, tmp_path: Path):
    whole = load_file(checkpoint / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(whole)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: whole[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    assert expected_digest(tmp_path, "float32") == expected_digest(checkpoint, "float32")


@pytest.mark.parametrize(
    "change", [{"architectures": ["OtherForCausalLM"]}, {"quantization_config": {"bits": 4}}]
)
def test_where_the_layout_is_not_known_nothing_is_claimed(checkpoint, tmp_path: Path, change):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    assert expected_digest(tmp_path, "float32") is None


def test_a_dtype_that_would_widen_is_not_guessed(checkpoint):
    assert expected_digest(checkpoint, "float64") is None


def test_the_dtype_of_a_checkpoint_is_what_it_declares(checkpoint, tmp_path: Path):
    assert checkpoint_dtype(checkpoint) == "float32"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    assert checkpoint_dtype(tmp_path) == "bfloat16"
