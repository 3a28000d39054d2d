"""Makes Megatron-Core 0.16.1 run where there is no CUDA, over gloo. Does nothing where there is.

Megatron asks CUDA for the current device, for its random state and for synchronisation, and writes
``device="cuda"`` in places; on a machine without CUDA each of these means the CPU here:

- ``torch.cuda.current_device`` answers the CPU; ``synchronize`` and ``empty_cache`` do nothing;
- CUDA's random state is the CPU generator's, also in Megatron's own copies of those functions;
- a ``TorchFunctionMode`` reads a literal CUDA device as the CPU, makes ``Tensor.cuda()`` return
  the tensor itself, and prefixes ``Tensor.type()`` with ``torch.cuda``, which Megatron asserts on.

The mode belongs to the thread that called :func:`enable`: build and run Megatron in that thread.
"""

import logging
import os
import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_entered = threading.local()


def enable() -> None:
    """Once per thread, before it imports or builds anything of Megatron. Idempotent."""
    if torch.cuda.is_available() or hasattr(_entered, "mode"):
        return
    # Megatron decorates with torch.compile, which needs a C++ compiler and minutes.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _answer_for_devices()
    _answer_for_random_state()
    _entered.mode = _CudaMeansCpu()
    _entered.mode.__enter__()


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = kwargs | {"device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _answer_for_devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = cuda.empty_cache = _nothing


def _answer_for_random_state() -> None:
    cuda: Any = torch.cuda
    cuda.get_rng_state = cuda.random.get_rng_state = _get_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_state
    cuda.manual_seed = _seed
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = _get_state
    megatron_random._set_cuda_rng_state = _set_state
    # It warns that the CPU's random state changed inside what it believes to be CUDA's.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
