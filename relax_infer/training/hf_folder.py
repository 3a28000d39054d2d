"""Hugging Face folders: digest, tensors in, a new folder out. Light: torch only where it reads or
writes tensors."""

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.failures import PermanentError

if TYPE_CHECKING:
    import torch

_WEIGHTS = "*.safetensors"
_NEW_WEIGHTS = "model.safetensors"
_NOT_COPIED = (_WEIGHTS, "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def weights_digest(folder: Path) -> str:
    """Digest of the folder's weights, whichever files they are spread over.

    SHA-256 over, for each tensor in name order: its name, its dtype as safetensors writes it
    (``F32``), its shape, each on a line of its own, and its bytes
    (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        PermanentError: no weights there, a tensor in two files, or a file that is not safetensors.
    """
    tensors: dict[str, tuple[dict[str, Any], memoryview]] = {}
    for path in sorted(folder.glob(_WEIGHTS)):
        for name, entry, data in _entries(path):
            if name in tensors:
                raise PermanentError(f"{folder}: tensor {name} is in more than one file.")
            tensors[name] = (entry, data)
    if not tensors:
        raise PermanentError(
            f"{folder} holds no *.safetensors with weights.",
            cure="Give a Hugging Face folder whose weights are safetensors.",
        )
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        entry, data = tensors[name]
        hasher.update(f"{name}\n{entry['dtype']}\n{json.dumps(entry['shape'])}\n".encode())
        hasher.update(data)
    return hasher.hexdigest()


def _entries(path: Path) -> list[tuple[str, dict[str, Any], memoryview]]:
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(mapped[:8], "little")
        header: dict[str, Any] = json.loads(bytes(mapped[8:start]))
    except (OSError, ValueError) as error:
        raise PermanentError(f"{path} cannot be read as safetensors: {error}.") from error
    header.pop("__metadata__", None)
    found: list[tuple[str, dict[str, Any], memoryview]] = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found.append((name, entry, mapped[start + begin : start + end]))
    return found


def read_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of the folder by its Hugging Face name, on the host, in its own dtype."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(_WEIGHTS)):
        tensors |= load_file(path)
    if not tensors:
        raise PermanentError(f"{folder} holds no *.safetensors with weights.")
    return tensors


def write_folder(target: Path, tensors: "Mapping[str, torch.Tensor]", model: Path) -> str:
    """A Hugging Face folder with new weights and everything else as in ``model``; its digest.

    Durable and atomic: the folder appears whole, or not at all. One that is there and holds other
    weights is replaced (nobody was told of it: its version is entered in the ledger later).

    Args:
        target: folder to make.
        tensors: by Hugging Face name, on any device, in the dtype to be written.
        model: the folder that config and tokenizer are copied from.
    """
    from safetensors.torch import save_file

    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, partial, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial / _NEW_WEIGHTS, metadata={"format": "pt"})
    digest = weights_digest(partial)
    if target.exists():
        if weights_digest(target) == digest:
            shutil.rmtree(partial)
            return digest
        shutil.rmtree(target)
    sync_tree(partial)
    partial.rename(target)
    sync_folder(target.parent)
    return digest


def sync_tree(folder: Path) -> None:
    """Every file and folder below ``folder``, itself included, is on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """The names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
