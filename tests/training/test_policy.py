"""The policy trainer on a CPU: what is trained, resumed, and trained once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.training import (
    PolicyTrainer,
    find_heritage,
    read_ledger,
    take_over,
    weights_digest,
)
from relax_infer.training.hf_folder import read_tensors
from relax_infer.transfer import PublishedRows, Ragged, rows_of_table
from tests.marks import wide
from tests.training.conftest import MEGATRON_WARNS, InThread, make_spec, write_model
from tests.transfer.tables import scored_table

pytestmark = MEGATRON_WARNS

Make = Callable[..., PolicyTrainer]


def rows(step: int, **changes: Any) -> PublishedRows:
    return rows_of_table(scored_table(groups=6, samples=4, seed=step, **changes))


def replaced(of: PublishedRows, name: str, column: Any) -> PublishedRows:
    return PublishedRows({**of.columns, name: column})


@pytest.fixture
def trainer(in_thread: InThread) -> Iterator[Make]:
    """Makes trainers, one after another: a process has one process group."""
    made: list[PolicyTrainer] = []

    def make(spec: TrainerSpec, **options: Any) -> PolicyTrainer:
        for earlier in made:
            in_thread(earlier.close)
        made.append(PolicyTrainer(spec, **options))
        in_thread(made[-1].onload)
        return made[-1]

    yield make
    for each in made:
        in_thread(each.close)


def train(in_thread: InThread, policy: PolicyTrainer, *steps: int) -> list[TrainResult]:
    return [in_thread(lambda step=step: policy.train(step, rows(step))) for step in steps]


def folder_of(result: TrainResult) -> Path:
    return Path(result.weights.uri.removeprefix("file://"))


def test_a_step_makes_new_weights_that_are_on_the_disk(
    spec: TrainerSpec, model_folder: Path, trainer: Make, in_thread: InThread
) -> None:
    (result,) = train(in_thread, trainer(spec), 1)
    assert weights_digest(folder_of(result)) == result.weights.digest
    assert result.weights.digest != weights_digest(model_folder)
    old, new = read_tensors(model_folder), read_tensors(folder_of(result))
    assert {n: (t.shape, t.dtype) for n, t in old.items()} == {
        n: (t.shape, t.dtype) for n, t in new.items()
    }
    assert all(not torch.equal(old[name], new[name]) for name in old)
    assert result.rows == 24
    assert result.tokens == rows(1).ragged("loss_mask").values.sum()


def test_resuming_from_a_checkpoint_is_bit_for_bit_the_same(
    spec: TrainerSpec, tmp_path: Path, model_folder: Path, trainer: Make, in_thread: InThread
) -> None:
    whole = train(in_thread, trainer(spec), 1, 2, 3)
    broken = make_spec(tmp_path / "other", model_folder)
    train(in_thread, trainer(broken), 1, 2)
    (resumed,) = train(in_thread, trainer(broken), 3)
    assert resumed.weights.digest == whole[2].weights.digest
    assert (resumed.loss, resumed.grad_norm) == (whole[2].loss, whole[2].grad_norm)


def test_a_run_that_goes_on_from_another_is_bit_for_bit_the_same(
    spec: TrainerSpec, tmp_path: Path, model_folder: Path, trainer: Make, in_thread: InThread
) -> None:
    whole = train(in_thread, trainer(spec), 1, 2, 3)
    broken = make_spec(tmp_path / "other", model_folder)
    train(in_thread, trainer(broken), 1, 2)
    later = make_spec(tmp_path / "later", model_folder)
    take_over(broken.run, later.run, find_heritage(broken.run))
    (resumed,) = train(in_thread, trainer(later), 3)
    assert resumed.weights.digest == whole[2].weights.digest
    assert (resumed.loss, resumed.grad_norm) == (whole[2].loss, whole[2].grad_norm)


def test_a_step_of_the_ledger_is_answered_and_not_trained_again(
    spec: TrainerSpec, trainer: Make, in_thread: InThread
) -> None:
    policy = trainer(spec)
    first, second = train(in_thread, policy, 1, 2)
    assert train(in_thread, policy, 2, 1) == [
        second.model_copy(update={"repeated": True}),
        first.model_copy(update={"repeated": True}),
    ]
    reopened = trainer(spec)
    assert train(in_thread, reopened, 2)[0].repeated
    assert read_ledger(spec.run).step == 2


def test_a_step_asked_again_with_other_rows_is_refused(
    spec: TrainerSpec, trainer: Make, in_thread: InThread
) -> None:
    policy = trainer(spec)
    train(in_thread, policy, 1)
    with pytest.raises(PermanentError, match="trained on rows of digest"):
        in_thread(lambda: policy.train(1, rows(7)))


def test_a_step_cannot_be_left_out(spec: TrainerSpec, trainer: Make, in_thread: InThread) -> None:
    policy = trainer(spec)
    with pytest.raises(PermanentError, match="the next is 1"):
        train(in_thread, policy, 2)
    assert read_ledger(spec.run).step == 0


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, in_thread: InThread
) -> list[TrainResult]:
    """Steps 1 and 2 of a run that nothing happens to."""
    policy = PolicyTrainer(make_spec(tmp_path_factory.mktemp("undisturbed"), model_folder))
    in_thread(policy.onload)
    try:
        return train(in_thread, policy, 1, 2)
    finally:
        in_thread(policy.close)


@pytest.mark.parametrize("moment", ["updated", *wide("exported"), "saved"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_step_that_fails_on_the_way_is_trained_as_if_it_had_never_begun(
    undisturbed: list[TrainResult],
    spec: TrainerSpec,
    trainer: Make,
    in_thread: InThread,
    moment: str,
    step: int,
) -> None:
    failing = [True]

    def fail(reached: str) -> None:
        if failing and reached == moment and read_ledger(spec.run).step == step - 1:
            failing.pop()
            raise OSError("the disk is full")

    policy = trainer(spec, moment=fail)
    train(in_thread, policy, *range(1, step))
    with pytest.raises(OSError, match="full"):
        train(in_thread, policy, step)
    again = train(in_thread, policy, *range(step, 3))
    assert not failing
    assert [r.weights.digest for r in again] == [r.weights.digest for r in undisturbed[step - 1 :]]


def test_a_failure_after_the_step_is_durable_does_not_train_it_again(
    spec: TrainerSpec, trainer: Make, in_thread: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trainer(spec)

    def full(_: int) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(policy._checkpoints, "_point_to", full)
        with pytest.raises(OSError, match="full"):
            train(in_thread, policy, 1)
    repeated, following = train(in_thread, policy, 1, 2)
    assert repeated.repeated
    assert not following.repeated


@pytest.mark.wide
def test_offloading_and_onloading_changes_nothing(
    spec: TrainerSpec, tmp_path: Path, model_folder: Path, trainer: Make, in_thread: InThread
) -> None:
    whole = train(in_thread, trainer(make_spec(tmp_path / "other", model_folder)), 1, 2)
    policy = trainer(spec)
    train(in_thread, policy, 1)
    in_thread(policy.offload)
    with pytest.raises(PermanentError, match="not resident"):
        train(in_thread, policy, 2)
    in_thread(policy.onload)
    (result,) = train(in_thread, policy, 2)
    assert result.weights.digest == whole[1].weights.digest


@pytest.mark.wide
def test_a_loss_that_breaks_down_is_told_and_leaves_the_checkpoint(
    spec: TrainerSpec, trainer: Make, in_thread: InThread
) -> None:
    policy = trainer(spec)
    first, *_ = train(in_thread, policy, 1)
    spoilt = replaced(rows(2), "reward", np.full(24, np.inf))
    with pytest.raises(PermanentError, match="broke down"):
        in_thread(lambda: policy.train(2, spoilt))
    assert read_ledger(spec.run).entries[-1].result == first
    assert train(in_thread, policy, 2)[0].step == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"teacher": False}, "no teacher_log_probs"), ({"reward": False}, "no reward")],
)
def test_a_channel_that_the_recipe_learns_from_must_be_there(
    spec: TrainerSpec, trainer: Make, in_thread: InThread, changes: dict[str, bool], told: str
) -> None:
    policy = trainer(spec)
    with pytest.raises(PermanentError, match=told):
        in_thread(lambda: policy.train(1, rows(1, **changes)))


def test_rows_without_a_token_to_train_on_are_refused(
    spec: TrainerSpec, trainer: Make, in_thread: InThread
) -> None:
    mask = rows(1).ragged("loss_mask")
    empty = replaced(rows(1), "loss_mask", Ragged(np.zeros_like(mask.values), mask.lengths))
    policy = trainer(spec)
    with pytest.raises(PermanentError, match="no token"):
        in_thread(lambda: policy.train(1, empty))


def test_weights_are_written_in_the_dtype_of_the_model(
    tmp_path: Path, trainer: Make, in_thread: InThread
) -> None:
    from safetensors.torch import save_file

    model = write_model(tmp_path / "bf16")
    halved = {n: t.to(torch.bfloat16) for n, t in read_tensors(model).items()}
    save_file(halved, model / "model.safetensors", metadata={"format": "pt"})
    (result,) = train(in_thread, trainer(make_spec(tmp_path / "store", model)), 1)
    assert {t.dtype for t in read_tensors(folder_of(result)).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures is .*Mistral"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type is 'yarn'"),
        ({"hidden_size": 32}, "config.json asks for"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
    ],
)
def test_a_model_that_cannot_be_trained_is_said_and_the_trainer_can_be_tried_again(
    tmp_path: Path, in_thread: InThread, change: dict[str, Any], told: str
) -> None:
    model = write_model(tmp_path / "model")
    right = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(right | change))
    policy = PolicyTrainer(make_spec(tmp_path / "store", model))
    with pytest.raises(PermanentError, match=told):
        in_thread(policy.onload)
    (model / "config.json").write_text(json.dumps(right))
    in_thread(policy.onload)
    in_thread(policy.close)


def test_what_tensor_parallel_ranks_have_parts_of_is_marked_for_the_gradient_norm(
    spec: TrainerSpec, trainer: Make, in_thread: InThread
) -> None:
    policy = trainer(spec)

    def marks() -> dict[str, tuple[bool, bool]]:
        from relax_infer.training.weights import mapping

        model = policy._learner.model
        parameters = dict(model.named_parameters())
        return {
            entry.megatron: (
                getattr(parameters[entry.megatron], "tensor_model_parallel", False),
                entry.layout != "whole",
            )
            for entry in mapping(model, policy._shape)
        }

    found = in_thread(marks)
    assert {marked for marked, _ in found.values()} == {True, False}
    assert all(marked == shared for marked, shared in found.values()), found
