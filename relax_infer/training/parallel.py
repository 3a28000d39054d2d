"""The process group and Megatron's parallel state of one trainer rank."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec
from relax_infer.training import cpu_megatron
from relax_infer.training.others import OtherRankFailed

T = TypeVar("T")

COLLECTIVE = timedelta(hours=1)
"""For the slowest rank of a collective: one may write the whole model while the others wait. A rank
that dies is noticed at once, by its connection on gloo and by the group's actors otherwise."""


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


class Meeting:
    """Where the ranks of a group meet: a TCP store that rank 0 serves, ``host:port`` to others."""

    def __init__(self, host: str) -> None:
        """Rank 0: serves at a port that is free; nobody has to be there yet."""
        distributed: Any = torch.distributed
        self.store = distributed.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=COLLECTIVE
        )
        self.address = f"{host}:{self.store.port}"


def start_parallel(
    device: torch.device, spec: TrainerSpec, rank: int, meeting: "Meeting | str | None" = None
) -> None:
    """Join the group: nccl on CUDA, gloo on a CPU, by the same code above it.

    Args:
        meeting: rank 0's own, or its address; None: a group of one rank.
    """
    cpu_megatron.enable()
    from megatron.core import parallel_state, tensor_parallel

    distributed: Any = torch.distributed
    if isinstance(meeting, str):
        host, _, port = meeting.rpartition(":")
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=COLLECTIVE)
    else:
        store = distributed.HashStore() if meeting is None else meeting.store
    distributed.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=spec.ranks,
        timeout=COLLECTIVE,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=spec.tensor_parallel,
        pipeline_model_parallel_size=spec.pipeline_parallel,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stop_parallel() -> None:
    """Undo :func:`start_parallel`; a process group that is left hinders the process from ending."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def together(call: Callable[[], T], device: torch.device) -> T:
    """What every rank does by itself, and none goes on after if it failed on one.

    Raises:
        OtherRankFailed: it failed elsewhere; where it failed, that rank's own error.
    """
    mine: BaseException | None = None
    result: Any = None
    try:
        result = call()
    except Exception as error:
        mine = error
    failed = _largest(torch.distributed.get_rank() + 1 if mine else 0, device)
    if mine is not None:
        raise mine
    if failed:
        raise OtherRankFailed(
            f"Trainer rank {failed - 1} failed; the others stopped with it.",
            cure="Its own error says why.",
        )
    return result


def on_any(flag: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    return bool(_largest(int(flag), device))


def from_first(value: T, device: torch.device) -> T:
    """Rank 0's value, on every rank."""
    values = [value]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(values, src=0, device=device)
    return values[0]


def _largest(number: int, device: torch.device) -> int:
    if torch.distributed.get_world_size() == 1:
        return number
    told = torch.tensor(number, device=device)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return int(told.item())
