"""The learning rate over steps, and training in bf16 with float32 masters."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_infer.contracts.training import TrainResult
from relax_infer.training import PolicyTrainer
from relax_infer.training.hf_folder import read_tensors
from relax_infer.transfer import rows_of_table
from tests.marks import wide
from tests.training.conftest import MEGATRON_WARNS, InThread, make_spec
from tests.transfer.tables import scored_table

pytestmark = MEGATRON_WARNS


def train(
    in_thread: InThread,
    store: Path,
    model: Path,
    *turns: list[int],
    groups: int = 6,
    **changes: Any,
) -> list[TrainResult]:
    """The steps of each turn by a trainer of its own; they go on from one store."""
    spec = make_spec(store, model, **changes)
    results: list[TrainResult] = []
    for turn in turns:
        policy = PolicyTrainer(spec)
        try:
            in_thread(policy.onload)
            for step in turn:
                rows = rows_of_table(scored_table(groups=groups, samples=4, seed=step))
                results.append(in_thread(lambda p=policy, s=step, r=rows: p.train(s, r)))
        finally:
            in_thread(policy.close)
    return results


@pytest.mark.parametrize("style", [*wide("constant", "linear"), "cosine"])
def test_the_rate_is_warmed_up_then_falls_as_its_style_says(
    tmp_path: Path, model_folder: Path, in_thread: InThread, style: str
) -> None:
    schedule = {
        "style": style,
        "warmup_steps": 2,
        "decay_steps": 4,
        "min_learning_rate": 1e-4,
    }
    turns = ([1, 2, 3], [4, 5])
    results = train(in_thread, tmp_path, model_folder, *turns, groups=1, schedule=schedule)
    falling = {
        "constant": [1e-3] * 3,
        "linear": [5.5e-4, 1e-4, 1e-4],
        "cosine": [1e-4 + 9e-4 * (1 + math.cos(math.pi / 2)) / 2, 1e-4, 1e-4],
    }[style]
    rates = [result.metrics["learning_rate"] for result in results]
    assert rates == pytest.approx([5e-4, 1e-3, *falling])


def test_the_rate_is_what_the_weights_move_by(
    tmp_path: Path, model_folder: Path, in_thread: InThread
) -> None:
    """AdamW's first step moves each weight by the learning rate, whatever its gradient."""
    changes = {"mini_batches": 1, "schedule": {"warmup_steps": 4}}
    (first,) = train(in_thread, tmp_path, model_folder, [1], **changes)
    before = read_tensors(model_folder)
    after = read_tensors(Path(first.weights.uri.removeprefix("file://")))
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert moved == pytest.approx(1e-3 / 4, rel=1e-3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_bf16_trains_with_masters_that_keep_what_bf16_cannot_show(
    tmp_path: Path, model_folder: Path, in_thread: InThread
) -> None:
    changes = {"precision": "bf16", "learning_rate": 1e-5}
    whole = train(in_thread, tmp_path / "a", model_folder, [1, 2, 3], **changes)
    resumed = train(in_thread, tmp_path / "b", model_folder, [1, 2], [3], **changes)
    assert resumed[2].weights.digest == whole[2].weights.digest
    plain = train(in_thread, tmp_path / "c", model_folder, [1], learning_rate=1e-5)
    assert whole[0].loss == pytest.approx(plain[0].loss, abs=0.02)
    # Norms are near 1, where bf16 has steps of 8e-3: after one update of 1e-5 nothing shows, the
    # masters have moved all the same.
    checkpoint = tmp_path / "a" / "run" / "checkpoints" / "step-3"
    masters = _saved(checkpoint, "optimizer.state.param.decoder.final_layernorm.weight")
    shown = read_tensors(Path(whole[2].weights.uri.removeprefix("file://")))["model.norm.weight"]
    rounded = masters.to(torch.bfloat16).float()
    assert torch.equal(rounded, shown)
    assert (masters != rounded).any()


def _saved(folder: Path, name: str) -> torch.Tensor:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    stored: Any = reader.read_metadata().state_dict_metadata[name]
    state = {name: torch.empty(stored.size, dtype=stored.properties.dtype)}
    load(state, storage_reader=reader, no_dist=True)
    return state[name]
