"""Hugging Face folders: digest, tensors in, a new folder out. Light: torch only where it reads or
writes tensors."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.engines.host_tensors import SentDigest, file_tensors, host_tensors

if TYPE_CHECKING:
    import torch

_WEIGHTS = "*.safetensors"
_NEW_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 << 30
"""Bytes of weights in one file, and that a writer holds at once."""
_NOT_COPIED = (_WEIGHTS, "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def weights_digest(folder: Path) -> str:
    """Digest of the folder's weights, whichever files they are spread over.

    SHA-256 over, for each tensor in name order: its name, its dtype as safetensors writes it
    (``F32``), its shape, each on a line of its own, and its bytes
    (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        PermanentError: no weights there, a tensor in two files, or a file that is not safetensors.
    """
    sent = SentDigest()
    sent.add(host_tensors(folder))
    return sent.digest


class FolderTensors(Mapping[str, "torch.Tensor"]):
    """The folder's tensors by their Hugging Face names, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            name: path for path in sorted(folder.glob(_WEIGHTS)) for name in _names(path)
        }
        if not self._files:
            raise PermanentError(f"{folder} holds no *.safetensors with weights.")

    def __getitem__(self, name: str) -> "torch.Tensor":
        """On the host, in its own dtype."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def dtype(self, name: str) -> "torch.dtype":
        """Without reading the tensor."""
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            piece: Any = file.get_slice(name)
            return piece[:0].dtype


def read_tensors(folder: Path) -> "dict[str, torch.Tensor]":
    """Every tensor of the folder by its Hugging Face name, on the host, in its own dtype."""
    return dict(FolderTensors(folder))


def write_folder(target: Path, tensors: "Mapping[str, torch.Tensor]", model: Path) -> str:
    """A Hugging Face folder with new weights and everything else as in ``model``; its digest.

    Args:
        target: folder to make.
        tensors: by Hugging Face name, on any device, in the dtype to be written.
        model: the folder that config and tokenizer are copied from.
    """
    partial = begin_folder(target, model)
    write_parts(partial, 0, tensors.items())
    return finish_folder(target)


def begin_folder(target: Path, model: Path) -> Path:
    """Where parts of the weights are to be written; what an earlier attempt left is gone."""
    partial = unfinished(target)
    shutil.rmtree(partial, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, partial, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    return partial


def write_parts(
    partial: Path,
    writer: int,
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    limit: int = FILE_BYTES,
) -> None:
    """One writer's tensors in files of at most ``limit`` bytes, or of one tensor.

    No more than a file's tensors are held at once. Writers have numbers of their own.
    """
    from safetensors.torch import save_file

    held: dict[str, torch.Tensor] = {}
    size, files = 0, 0

    def write() -> None:
        nonlocal size, files
        if held:
            path = partial / f"part-{writer:05}-{files:05}.safetensors"
            save_file(held, path, metadata={"format": "pt"})
            held.clear()
            size, files = 0, files + 1

    for name, tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        if size + whole.nbytes > limit:
            write()
        held[name] = whole
        size += whole.nbytes
    write()


def finish_folder(target: Path) -> str:
    """All parts are written: name them as others expect, and make the folder appear; its digest.

    Durable and atomic: the folder appears whole, or not at all. One that is there and holds other
    weights is replaced (nobody was told of it: its version is entered in the ledger later).
    """
    partial = unfinished(target)
    parts = sorted(partial.glob("part-*.safetensors"))
    names = [_NEW_WEIGHTS]
    if len(parts) > 1:
        names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    where: dict[str, str] = {}
    total = 0
    for part, name in zip(parts, names, strict=True):
        for tensor in file_tensors(part):
            where[tensor.name] = name
            total += len(tensor.data)
        part.rename(partial / name)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (partial / _INDEX).write_text(json.dumps(index, indent=1))
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


def unfinished(target: Path) -> Path:
    """Where the folder is made before it appears."""
    return target.with_name(f"{target.name}.partial")


def _names(path: Path) -> list[str]:
    return [tensor.name for tensor in file_tensors(path)]


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
