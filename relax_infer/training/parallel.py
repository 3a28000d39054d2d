"""The process group and Megatron's parallel state of one trainer rank."""

import os
from typing import Any

import torch
import torch.distributed

from relax_infer.contracts.failures import PermanentError
from relax_infer.training import cpu_megatron


def choose_device(wanted: str, gpu: int) -> torch.device:
    """The device that this rank computes on.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.
        gpu: index among the devices that this process sees.

    Raises:
        PermanentError: CUDA is wanted and not there.
    """
    if wanted == "cpu":
        # Before anything asks CUDA: Megatron takes CUDA wherever it is.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        return device
    if wanted == "cuda":
        raise PermanentError(
            "The trainer is to run on CUDA and this host's PyTorch sees no device.",
            cure="Install a CUDA build of PyTorch there, or set cluster.device to cpu.",
        )
    # One thread: the pretended devices of a CPU stack share its cores, and sums keep their order.
    torch.set_num_threads(1)
    return torch.device("cpu")


def start_parallel(device: torch.device) -> None:
    """World 1: nccl on CUDA, gloo on a CPU, by the same code above it."""
    cpu_megatron.enable()
    from megatron.core import parallel_state, tensor_parallel

    distributed: Any = torch.distributed
    distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stop_parallel() -> None:
    """Undo :func:`start_parallel`; a process group that is left hinders the process from ending."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
