"""A trainer that is killed anywhere in a step trains that step exactly once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_infer.contracts.training import TrainerSpec
from relax_infer.training import read_ledger, weights_digest
from relax_infer.training.ledger import run_folder
from tests.marks import wide
from tests.training.conftest import make_spec

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

_ROOT = Path(__file__).parents[2]


def trainer_process(spec: TrainerSpec, moment: str, *steps: int) -> tuple[int, list[list[str]]]:
    """Exit code, and what it said of each step that ended."""
    folder = run_folder(spec.run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.killed", folder / "spec.json"]
    done = subprocess.run(
        [*command, moment, *map(str, steps)], cwd=_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [line.split() for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> list[list[str]]:
    spec = make_spec(tmp_path_factory.mktemp("undisturbed"), model_folder)
    code, said = trainer_process(spec, "never", 1, 2, 3)
    assert code == 0
    return said


@pytest.mark.parametrize("moment", [*wide("updated", "exported"), "saved"])
def test_a_kill_before_the_step_is_durable_trains_it_again_to_the_same_weights(
    spec: TrainerSpec, undisturbed: list[list[str]], moment: str
) -> None:
    code, said = trainer_process(spec, moment, 1, 2)
    assert (code, [line[0] for line in said]) == (-signal.SIGKILL, ["1"])
    assert read_ledger(spec.run).step == 1
    code, said = trainer_process(spec, "never", 1, 2, 3)
    assert code == 0
    assert said == [[*undisturbed[0][:1], "repeated", *undisturbed[0][2:]], *undisturbed[1:]]
    _everything_is_whole(spec, undisturbed)


def test_a_kill_after_the_step_is_durable_does_not_train_it_again(
    spec: TrainerSpec, undisturbed: list[list[str]]
) -> None:
    code, said = trainer_process(spec, "committed", 1, 2)
    assert (code, [line[0] for line in said]) == (-signal.SIGKILL, ["1"])
    code, said = trainer_process(spec, "never", 2, 3)
    assert code == 0
    assert [line[1] for line in said] == ["repeated", "trained"]
    assert [line[2] for line in said] == [line[2] for line in undisturbed[1:]]
    _everything_is_whole(spec, undisturbed)


def _everything_is_whole(spec: TrainerSpec, undisturbed: list[list[str]]) -> None:
    folder = run_folder(spec.run)
    assert [e.result.step for e in read_ledger(spec.run).entries] == [1, 2, 3]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["latest", "step-2", "step-3"]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["1", "2", "3"]
    for step, _, digest in undisturbed:
        assert weights_digest(folder / "weights" / step) == digest
