"""Digests of weights, and folders that appear whole or not at all."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax_infer.contracts.failures import PermanentError
from relax_infer.training import hf_folder, weights_digest
from relax_infer.training.hf_folder import (
    FolderTensors,
    begin_folder,
    finish_folder,
    read_tensors,
    write_folder,
    write_parts,
)


@pytest.fixture
def tensors(model_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(model_folder / "model.safetensors")


def test_the_digest_does_not_care_how_weights_are_spread_over_files(
    tmp_path: Path, model_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[5:]}, tmp_path / "a.safetensors")
    save_file({n: tensors[n] for n in names[:5]}, tmp_path / "b.safetensors")
    assert weights_digest(tmp_path) == weights_digest(model_folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"model.norm.weight": t["model.norm.weight"] + 1},
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].reshape(8, 8)},
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].to(torch.bfloat16)},
        lambda t: {("x" if n == "model.norm.weight" else n): v for n, v in t.items()},
    ],
    ids=["value", "shape", "dtype", "name"],
)
def test_the_digest_sees(
    tmp_path: Path, model_folder: Path, tensors: dict[str, torch.Tensor], change: object
) -> None:
    assert callable(change)
    save_file(change(tensors), tmp_path / "model.safetensors")
    assert weights_digest(tmp_path) != weights_digest(model_folder)


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="holds no"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(PermanentError, match="cannot be read as safetensors"):
        weights_digest(tmp_path)


def test_a_new_folder_has_the_new_weights_and_everything_else_of_the_model(
    tmp_path: Path, model_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    target = tmp_path / "weights" / "1"
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    digest = write_folder(target, changed, model_folder)
    assert digest == weights_digest(target) != weights_digest(model_folder)
    assert sorted(p.name for p in target.iterdir()) == sorted(
        p.name for p in model_folder.iterdir()
    )
    assert all(torch.equal(t, changed[n]) for n, t in read_tensors(target).items())


def test_a_folder_of_an_attempt_that_was_not_entered_is_replaced(
    tmp_path: Path, model_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    target = tmp_path / "1"
    write_folder(target, {n: t + 1 for n, t in tensors.items()}, model_folder)
    digest = write_folder(target, tensors, model_folder)
    assert weights_digest(target) == digest == weights_digest(model_folder)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_folder_that_is_being_written_is_not_there(
    tmp_path: Path,
    model_folder: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: Path) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(hf_folder, "sync_tree", full)
        with pytest.raises(OSError, match="full"):
            write_folder(tmp_path / "1", tensors, model_folder)
    assert not (tmp_path / "1").exists()
    write_folder(tmp_path / "1", tensors, model_folder)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_weights_of_several_writers_and_files_are_one_folder_with_an_index(
    tmp_path: Path, model_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    target = tmp_path / "weights" / "1"
    partial = begin_folder(target, model_folder)
    names = sorted(tensors)
    held: list[int] = []

    def given(part: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in part:
            held.append(len(list(partial.glob("part-*"))))
            yield name, tensors[name]

    write_parts(partial, 1, given(names[:12]), limit=30_000)
    assert held[-1] > 1, "nothing was written before the last tensor came"
    write_parts(partial, 0, given(names[12:]), limit=30_000)
    assert finish_folder(target) == weights_digest(model_folder)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], tensors[name])


def test_a_tensor_is_read_when_it_is_asked_for_and_its_dtype_without_it(
    model_folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    folder = FolderTensors(model_folder)
    assert set(folder) == set(tensors)
    assert all(folder.dtype(name) == tensor.dtype for name, tensor in tensors.items())
    assert all(torch.equal(folder[name], tensor) for name, tensor in tensors.items())
