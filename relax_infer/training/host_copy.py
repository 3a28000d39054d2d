"""Taking tensors off the device and back without any view of them noticing.

Megatron's parameters, gradients and optimizer shards are views into flat buffers: moving a tensor
alone would part it from its buffer. So whole storages are copied to the host and emptied, and
filled again in place.
"""

from collections.abc import Iterable

import torch


class HostCopy:
    """The contents of every device storage that some tensors are in."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def leave(self, tensors: Iterable[torch.Tensor], *, device: str = "cuda") -> int:
        """Copy each storage of that device type to the host, once, and free it; bytes freed."""
        freed = 0
        # What was coming back when that failed: the copy is still the truth.
        for storage, _ in self._away:
            storage.resize_(0)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type != device or storage.nbytes() == 0:
                continue
            freed += storage.nbytes()
            self._away.append((storage, storage.clone() if device == "cpu" else storage.cpu()))
            storage.resize_(0)
        return freed

    def come_back(self) -> None:
        """Everything is where it was. Idempotent; after a failure, ask again."""
        while self._away:
            storage, copy = self._away[-1]
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
            self._away.pop()
