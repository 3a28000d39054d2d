"""Checkpoint folders and the ledger in them."""

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.training import Ledger, LedgerEntry, read_ledger
from relax_infer.training.ledger import KEPT_ENTRIES, Checkpoints, run_folder


def entry(step: int) -> LedgerEntry:
    result = TrainResult(
        step=step,
        rows=1,
        loss=0.0,
        grad_norm=0.0,
        clip_fraction=0.0,
        policy_kl=0.0,
        logprob_gap=0.0,
        tokens=1,
        seconds=0.0,
        weights=WeightsRef(version=step, uri="file:///w", digest="d"),
    )
    return LedgerEntry(result=result, partition="r/train_1", digest=f"digest-{step}")


def commit(
    checkpoints: Checkpoints, step: int, ledger: Ledger, keep: int = 2, every: int = 0
) -> Ledger:
    (checkpoints.begin(step) / "weights").write_text(str(step))
    ledger = ledger.with_entry(entry(step))
    checkpoints.commit(step, ledger, keep, every)
    return ledger


def test_a_run_that_never_trained_has_an_empty_ledger(spec: TrainerSpec) -> None:
    assert read_ledger(spec.run) == Ledger()


def test_a_step_is_in_the_ledger_when_its_folder_is_there(spec: TrainerSpec) -> None:
    checkpoints = Checkpoints(spec.run)
    ledger = commit(checkpoints, 1, Ledger())
    assert read_ledger(spec.run) == ledger
    checkpoints.begin(2)
    assert read_ledger(spec.run).step == 1
    assert (checkpoints.folder / "latest").read_text() == "step-1\n"


def test_the_newest_checkpoints_are_kept_and_all_entries(spec: TrainerSpec) -> None:
    checkpoints, ledger = Checkpoints(spec.run), Ledger()
    for step in range(1, 5):
        ledger = commit(checkpoints, step, ledger)
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["latest", "step-3", "step-4"]
    assert [e.result.step for e in read_ledger(spec.run).entries] == [1, 2, 3, 4]


def test_some_steps_are_kept_for_good_with_their_weights(spec: TrainerSpec) -> None:
    checkpoints, ledger = Checkpoints(spec.run), Ledger()
    for step in range(1, 9):
        (run_folder(spec.run) / "weights" / str(step)).mkdir(parents=True)
        (run_folder(spec.run) / "weights" / f"{step}.partial").mkdir()
        ledger = commit(checkpoints, step, ledger, every=3)
        checkpoints.drop_weights(step, keep=3, every=3)
    assert checkpoints.steps() == [3, 6, 7, 8]
    weights = [path.name for path in (run_folder(spec.run) / "weights").iterdir()]
    assert sorted(name for name in weights if name.isdecimal()) == ["3", "6", "7", "8"]
    assert len(weights) == 4 + 8, "what is being written is nobody's to delete"


def test_ten_is_newer_than_nine(spec: TrainerSpec) -> None:
    checkpoints, ledger = Checkpoints(spec.run), Ledger()
    for step in range(1, 11):
        ledger = commit(checkpoints, step, ledger)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.name == "step-10"


def test_what_a_killed_attempt_left_is_not_mixed_into_the_next(spec: TrainerSpec) -> None:
    checkpoints = Checkpoints(spec.run)
    (checkpoints.begin(1) / "half").write_text("written")
    assert list(checkpoints.begin(1).iterdir()) == []


def test_a_ledger_does_not_grow_without_end() -> None:
    ledger = Ledger()
    for step in range(1, KEPT_ENTRIES + 11):
        ledger = ledger.with_entry(entry(step))
    assert len(ledger.entries) == KEPT_ENTRIES
    assert ledger.step == KEPT_ENTRIES + 10


def test_a_damaged_ledger_is_said_with_its_path(spec: TrainerSpec) -> None:
    checkpoints = Checkpoints(spec.run)
    commit(checkpoints, 1, Ledger())
    (checkpoints.path(1) / "ledger.json").write_text("{")
    with pytest.raises(PermanentError, match=r"step-1/ledger\.json"):
        read_ledger(spec.run)


def test_a_store_that_is_no_file_system_is_refused() -> None:
    with pytest.raises(PermanentError, match="s3://bucket"):
        run_folder(RunRef(run="r", store="s3://bucket/runs"))
