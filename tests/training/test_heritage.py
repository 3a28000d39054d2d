"""A run that goes on from another's checkpoint."""

from pathlib import Path

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.training import Ledger, find_heritage, read_ledger, take_over
from relax_infer.training.ledger import Checkpoints, run_folder
from tests.training.test_ledger import entry


@pytest.fixture
def earlier(tmp_path: Path) -> RunRef:
    """Trained four steps, of which two checkpoints are kept."""
    run = RunRef(run="earlier", store=tmp_path.as_uri())
    checkpoints, ledger = Checkpoints(run), Ledger()
    for step in range(1, 5):
        folder = run_folder(run) / "weights" / str(step)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights {step}")
        (checkpoints.begin(step) / "critic").mkdir()
        (checkpoints.unfinished(step) / "critic" / "shard").write_text(f"optimizer {step}")
        made = entry(step)
        weights = WeightsRef(version=step, uri=folder.as_uri(), digest=f"d{step}")
        result = made.result.model_copy(update={"weights": weights})
        ledger = ledger.with_entry(made.model_copy(update={"result": result}))
        checkpoints.commit(step, ledger, keep=2)
    return run


@pytest.fixture
def later(tmp_path: Path) -> RunRef:
    return RunRef(run="later", store=(tmp_path / "elsewhere").as_uri())


@pytest.mark.parametrize("step", [None, 3])
def test_weights_optimizer_and_ledger_are_the_new_runs_own(
    earlier: RunRef, later: RunRef, step: int | None
):
    found = find_heritage(earlier, step)
    assert found.step == (step or 4)
    own = take_over(earlier, later, found)
    weights = run_folder(later) / "weights" / str(found.step)
    assert (own.step, own.weights.version, own.weights.digest) == (
        found.step,
        found.step,
        f"d{found.step}",
    )
    assert own.weights.uri == weights.as_uri()
    ledger = read_ledger(later)
    assert ledger.step == found.step
    assert ledger.entries[-1].result.weights == own.weights
    assert [e.digest for e in ledger.entries] == [f"digest-{n}" for n in range(1, found.step + 1)]
    shard = Checkpoints(later).path(found.step) / "critic" / "shard"
    assert shard.read_text() == f"optimizer {found.step}"
    assert (weights / "model.safetensors").read_text() == f"weights {found.step}"


def test_the_earlier_run_is_untouched_and_may_go(earlier: RunRef, later: RunRef):
    before = read_ledger(earlier)
    take_over(earlier, later, find_heritage(earlier))
    assert read_ledger(earlier) == before
    weights = run_folder(earlier) / "weights" / "4" / "model.safetensors"
    weights.unlink()
    assert (run_folder(later) / "weights" / "4" / "model.safetensors").exists()


def test_taking_over_again_changes_nothing(earlier: RunRef, later: RunRef):
    found = find_heritage(earlier)
    first = take_over(earlier, later, found)
    Checkpoints(later).begin(5)
    assert take_over(earlier, later, found) == first
    assert Checkpoints(later).unfinished(5).is_dir()


def test_a_kill_leaves_nothing_half_made(
    earlier: RunRef, later: RunRef, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    found = find_heritage(earlier)
    with monkeypatch.context() as patch:
        patch.setattr("relax_infer.training.heritage.sync_tree", die)
        with pytest.raises(KeyboardInterrupt):
            take_over(earlier, later, found)
    assert read_ledger(later) == Ledger()
    assert take_over(earlier, later, found).step == 4


def test_files_are_copied_where_they_cannot_be_linked(
    earlier: RunRef, later: RunRef, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr("os.link", refuse)
    take_over(earlier, later, find_heritage(earlier))
    assert (run_folder(later) / "weights" / "4" / "model.safetensors").read_text() == "weights 4"


def test_what_cannot_be_gone_on_from_is_named(earlier: RunRef, tmp_path: Path):
    with pytest.raises(PermanentError, match="keeps no checkpoint of step 2; it has 3, 4"):
        find_heritage(earlier, 2)
    with pytest.raises(PermanentError, match="run nobody has no checkpoint"):
        find_heritage(RunRef(run="nobody", store=tmp_path.as_uri()))
    (run_folder(earlier) / "weights" / "4" / "model.safetensors").unlink()
    (run_folder(earlier) / "weights" / "4").rmdir()
    with pytest.raises(PermanentError, match="weights of step 4 are gone"):
        find_heritage(earlier)
    (Checkpoints(earlier).path(4) / "ledger.json").write_text("{")
    with pytest.raises(PermanentError, match=r"ledger\.json cannot be read"):
        find_heritage(earlier)
