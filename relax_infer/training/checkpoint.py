"""Model and optimizer to and from a folder, by Megatron's distributed checkpointing."""

import functools
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state

_BACKEND, _VERSION = "torch_dist", 1
# How the distributed optimizer's state is laid out, so that another layout of ranks can load it.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def save(folder: Path, model: Any, optimizer: Any) -> None:
    """Every rank writes its part into an existing, empty folder."""
    dist_checkpointing.save(
        _state(model, optimizer), str(folder), _SaveInThisProcess(_BACKEND, _VERSION)
    )


def load(folder: Path, model: Any, optimizer: Any) -> None:
    """Bit for bit what was saved, whatever the layout of ranks was then."""
    _prepare(optimizer)
    loaded: Any = dist_checkpointing.load(_state(model, optimizer, loading=True), str(folder))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(optimizer)


def _state(model: Any, optimizer: Any, *, loading: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(
        state["model"], is_loading=loading, metadata=_METADATA
    )
    return state


def _prepare(optimizer: Any) -> None:
    """PyTorch's AdamW makes its state in its first step; Megatron loads into state that is there,
    and trips over AdamW's count of steps, which it has loaded elsewhere."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = each.optimizer
        if not isinstance(inner, torch.optim.Adam):
            continue  # others count steps in their groups
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                empty = torch.zeros_like(parameter.data)
                inner.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": empty,
                    "exp_avg_sq": empty.clone(),
                }
        each._set_main_param_and_optimizer_states = functools.partial(_put_state, each)


@torch.no_grad()
def _put_state(each: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """As Megatron's own, without the count of steps."""
    group, order = each.model_param_group_index_map[parameter]
    main = each.optimizer.param_groups[group]["params"][order]
    for name, target in {"param": main, **each.optimizer.state[main]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _separate_steps(optimizer: Any) -> None:
    """AdamW counts its steps in a tensor per parameter. Loading may make all of them one tensor,
    to which AdamW would then add 1 once per parameter."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in each.optimizer.state.values():
            if isinstance(step := state.get("step"), torch.Tensor):
                state["step"] = step.clone()


class _SaveInThisProcess(TorchDistSaveShardedStrategy):
    """Megatron's format, written without its forked writers and the manager process that collects
    from them: that one outlives a trainer which is killed."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(
                checkpoint_dir, single_file_per_rank=True, sync_files=False
            ),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
