"""Rank 0 of one process group through which weights are sent: gloo on a CPU, nccl on CUDA.

The group has nothing to do with those that PyTorch knows by name in this process: the trainer's own
goes on beside it. The other ranks are SGLang's, which make theirs with
``torch.distributed``; the prefixes of the store are those that it gives a group.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.engines.host_tensors import Bucket, size_of

JOIN_SECONDS = 60.0
"""For all ranks to meet; they are told to at the same time."""
_POLL = 0.0005


class TorchGroup:
    """Used by one thread; :meth:`abort` may come from another."""

    def __init__(self, host: str, backend: str, world: int, timeout: float, gpu: int) -> None:
        """Serves the store at a port that is free. ``timeout``: seconds to the last broadcast."""
        import torch.distributed

        self._backend, self._world, self._gpu = backend, world, gpu
        self._deadline = time.monotonic() + timeout
        self.name = f"weights-{uuid.uuid4().hex}"
        self._aborted: str | None = None
        self._group: Any = None
        self._memory: Any = None
        distributed: Any = torch.distributed
        self._store: Any = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port

    def join(self) -> None:
        """Returns when every rank is there; raises RuntimeError where one is not, in time."""
        import torch.distributed

        distributed: Any = torch.distributed
        cuda = self._backend == "nccl"
        store: Any = self._store
        for prefix in (self.name, f"{self.name}/", "cuda/" if cuda else "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        limit = timedelta(seconds=min(JOIN_SECONDS, self._left()))
        store.set_timeout(limit)
        if cuda:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = distributed.ProcessGroupNCCL(store, 0, self._world, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, 0, self._world, timeout=limit)
        self._group._set_default_timeout(timedelta(seconds=self._left()))

    def send(self, bucket: Bucket) -> None:
        """Broadcast its bytes as one tensor.

        Raises:
            UnconfirmedError: not in time, or somebody aborted.
            RuntimeError: a rank is gone.
        """
        work = self._group.broadcast(self._filled(bucket), root=0)
        while not work.is_completed():
            if self._aborted is not None:
                raise UnconfirmedError(self._aborted)
            self._left()
            time.sleep(_POLL)
        work.wait()

    def abort(self, why: str) -> None:
        """Nothing more is sent; what is being sent ends with an error."""
        self._aborted = self._aborted or why

    def close(self) -> None:
        """Ranks that wait in the group are freed: its connections and its store end."""
        group, self._group, self._store, self._memory = self._group, None, None, None
        if group is not None and self._backend == "nccl":
            group.abort()

    def _filled(self, bucket: Bucket) -> Any:
        import numpy as np
        import torch

        size, start = size_of(bucket), 0
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(max(1, size), dtype=torch.uint8)
        target = self._memory.numpy()
        for tensor in bucket:
            stop = start + tensor.data.nbytes
            target[start:stop] = np.frombuffer(tensor.data, dtype=np.uint8)
            start = stop
        whole = self._memory[:size]
        return whole.to(torch.device("cuda", self._gpu)) if self._backend == "nccl" else whole

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise UnconfirmedError("The engines have not got their weights in time.")
        return left
