"""One bucket of tensors in shared memory, and what an engine has to be told to find it there.

SGLang's ``/update_weights_from_tensor`` takes pickles of PyTorch's multiprocessing: a handle and no
bytes. By file name, not by descriptor: a descriptor is fetched over a socket that a process which
is no child cannot use, and SGLang dies of it.
"""

import base64
import io
import multiprocessing.reduction
import os
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError
from relax_infer.engines.host_processes import SHARED_MEMORY
from relax_infer.engines.host_tensors import Bucket, size_of


class SharedBucket:
    """Memory for one bucket after another. Not for two callers at once."""

    def __init__(self) -> None:
        self._whole: Any = None
        self._file: Path | None = None
        self._all_opened = True
        """Whether nothing that was given out may be opened yet."""

    def fill(self, bucket: Bucket) -> None:
        """Copy a bucket's bytes in; blocks for as long as they take to read. The memory is made
        anew where the last bucket was smaller."""
        import numpy as np
        import torch

        size = size_of(bucket)
        if self._whole is None or self._whole.numel() < size:
            self.close()
            _check_room(size)
            torch.multiprocessing.set_sharing_strategy("file_system")
            self._whole = torch.empty(max(1, size), dtype=torch.uint8).share_memory_()
            name: bytes = self._whole.untyped_storage()._share_filename_cpu_()[1]
            self._file = Path(SHARED_MEMORY) / name.decode().lstrip("/")
        target, start = self._whole.numpy(), 0
        for tensor in bucket:
            stop = start + tensor.data.nbytes
            target[start:stop] = np.frombuffer(tensor.data, dtype=np.uint8)
            start = stop

    def handles(self, bucket: Bucket, ranks: int) -> list[str]:
        """For each of an engine's ranks the tensors of the bucket that was filled in last, pickled,
        in base64: views of the one shared memory. A handle can be opened once."""
        named = self._views(bucket)
        self._all_opened = False
        made: list[str] = []
        for _ in range(ranks):
            pickled = io.BytesIO()
            multiprocessing.reduction.ForkingPickler(pickled).dump(named)
            made.append(base64.b64encode(pickled.getvalue()).decode())
        return made

    def opened(self) -> None:
        """Every handle that was given out has been opened."""
        self._all_opened = True

    def close(self) -> None:
        """Give the memory back. Who opens a handle later fails: an engine dies of it."""
        self._whole = None
        if self._file is not None and not self._all_opened:
            # PyTorch counts who has it open and waits for those that never came.
            self._file.unlink(missing_ok=True)
        self._file, self._all_opened = None, True

    def _views(self, bucket: Bucket) -> list[tuple[str, Any]]:
        import torch

        views: list[tuple[str, Any]] = []
        start = 0
        for tensor in bucket:
            stop = start + tensor.data.nbytes
            plan = tensor.plan
            part = self._whole[start:stop].view(getattr(torch, plan.dtype))
            views.append((plan.name, part.reshape(plan.shape)))
            start = stop
        return views


def _check_room(size: int) -> None:
    """Writing where there is none kills the process."""
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if free < size:
        raise PermanentError(
            f"{SHARED_MEMORY} has {free // 1_000_000} MB free, a bucket of weights needs"
            f" {size // 1_000_000}.",
            cure="Make it larger (docker: --shm-size), or lower train.weights.bucket_mb.",
        )
