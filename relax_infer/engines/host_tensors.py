"""The tensors of a Hugging Face folder as they are on the host, and how they are cut into buckets.

Nothing is read before it is used: a tensor is a view of its mapped file.
"""

import hashlib
import json
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.weights import TensorPlan

_PYTORCH = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    **{"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
}
_ITEM = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Bytes of one number; 1 for others."""


class OtherWeights(PermanentError):
    """A folder does not hold what the trainer published: nobody may load from it."""


@dataclass(frozen=True)
class HostTensor:
    """One tensor of a safetensors file."""

    name: str
    dtype: str
    """As safetensors writes it, such as ``F32``."""
    shape: tuple[int, ...]
    data: memoryview
    """Its bytes."""

    @property
    def plan(self) -> TensorPlan:
        return TensorPlan(name=self.name, dtype=_PYTORCH[self.dtype], shape=self.shape)


Bucket = tuple[HostTensor, ...]


def host_tensors(folder: Path) -> list[HostTensor]:
    """Every tensor of the folder's ``*.safetensors``, in name order.

    Raises:
        PermanentError: no weights there, a tensor in two files, or a file that is not safetensors.
    """
    found: dict[str, HostTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in file_tensors(path):
            if tensor.name in found:
                raise PermanentError(f"{folder}: tensor {tensor.name} is in more than one file.")
            found[tensor.name] = tensor
    if not found:
        raise PermanentError(
            f"{folder} holds no *.safetensors with weights.",
            cure="Give a Hugging Face folder whose weights are safetensors.",
        )
    return [found[name] for name in sorted(found)]


def file_tensors(path: Path) -> list[HostTensor]:
    """Of one file, in its header's order (https://huggingface.co/docs/safetensors, "Format").

    Raises:
        PermanentError: it is not safetensors.
    """
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = 8 + int.from_bytes(mapped[:8], "little")
        header: dict[str, Any] = json.loads(bytes(mapped[8:start]))
    except (OSError, ValueError) as error:
        raise PermanentError(f"{path} cannot be read as safetensors: {error}.") from error
    header.pop("__metadata__", None)
    found: list[HostTensor] = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = mapped[start + begin : start + end]
        found.append(HostTensor(name, entry["dtype"], tuple(entry["shape"]), data))
    return found


def cut(tensors: Iterable[HostTensor], limit: int) -> list[Bucket]:
    """Buckets of at most ``limit`` bytes, or of one tensor that is larger, in the order given.

    In a bucket the bytes follow one another; one ends where the next tensor's numbers would not be
    aligned.

    Raises:
        PermanentError: a tensor of a dtype that is not sent.
    """
    made: list[Bucket] = []
    held: list[HostTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.dtype not in _PYTORCH:
            raise PermanentError(
                f"Tensor {tensor.name} has dtype {tensor.dtype}, which is not sent to engines.",
                cure="Set train.weights.transport to disk.",
            )
        misfit = size % _ITEM.get(tensor.dtype, 1) != 0
        if held and (size + tensor.data.nbytes > limit or misfit):
            made.append(tuple(held))
            held, size = [], 0
        held.append(tensor)
        size += tensor.data.nbytes
    return [*made, tuple(held)] if held else made


def size_of(bucket: Bucket) -> int:
    """Bytes."""
    return sum(tensor.data.nbytes for tensor in bucket)


class SentDigest:
    """Digest of what was sent, to be compared with that of the weights' reference: SHA-256 over
    each tensor's name, dtype and shape, on a line each, and its bytes, in name order."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def add(self, tensors: Sequence[HostTensor]) -> None:
        for each in tensors:
            shape = json.dumps(list(each.shape))
            self._hasher.update(f"{each.name}\n{each.dtype}\n{shape}\n".encode())
            self._hasher.update(each.data)

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def check(self, expected: str, folder: Path) -> None:
        """Raises :class:`OtherWeights`: others than the trainer published were sent. Those of an
        unknown digest (empty) are not compared."""
        if expected and self.digest != expected:
            raise OtherWeights(
                f"The weights in {folder} have digest {self.digest}; the trainer published"
                f" {expected}.",
                cure="Somebody changed the folder: no engine may load from it.",
            )
