"""What a step leaves on the disk: new weights and a checkpoint, written by all ranks together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from relax_infer.training import checkpoint
from relax_infer.training.hf_folder import begin_folder, finish_folder, unfinished, write_parts
from relax_infer.training.ledger import Checkpoints
from relax_infer.training.parallel import together
from relax_infer.training.sums import check_sums, write_sums
from relax_infer.training.weights import export_weights

CRITIC = "critic"
"""Folder of the critic in a checkpoint."""


def export_folder(
    target: Path,
    model: Path,
    policy: Any,
    shape: Any,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> str:
    """The policy as a Hugging Face folder beside ``model``'s other files; its digest, on rank 0.

    Each stage writes its own files, tensor by tensor, so that no rank has the whole model.
    """
    first = torch.distributed.get_rank() == 0
    together(lambda: begin_folder(target, model) if first else None, device)

    def write() -> None:
        # One of the data parallel ranks, which all have the same.
        if parallel_state.get_data_parallel_rank() == 0:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            exported = export_weights(policy, shape)
            write_parts(unfinished(target), stage, ((n, t.to(dtypes[n])) for n, t in exported))

    together(write, device)
    return together(lambda: finish_folder(target) if first else "", device)


def save_checkpoint(
    checkpoints: Checkpoints, step: int, policy: Any, critic: Any | None, device: torch.device
) -> None:
    """Every rank's part is in the unfinished folder when this returns on any."""
    first = torch.distributed.get_rank() == 0
    together(lambda: checkpoints.begin(step) if first else None, device)
    folder = checkpoints.unfinished(step)
    together(lambda: checkpoint.save(folder, policy.model, policy.optimizer), device)
    if critic is not None:
        inner = folder / CRITIC
        together(lambda: inner.mkdir() if first else None, device)
        together(lambda: checkpoint.save(inner, critic.model, critic.optimizer), device)
    together(lambda: write_sums(folder, *_place()), device)


def load_checkpoint(folder: Path, policy: Any, critic: Any | None, device: torch.device) -> None:
    """What :func:`save_checkpoint` saved, by whatever layout of ranks.

    Raises:
        PermanentError: on a rank, that a file is not what was saved.
    """
    together(lambda: check_sums(folder, *_place()), device)
    checkpoint.load(folder, policy.model, policy.optimizer)
    if critic is not None:
        checkpoint.load(folder / CRITIC, critic.model, critic.optimizer)


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
