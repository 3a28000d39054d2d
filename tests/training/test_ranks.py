"""Groups of ranks: one ledger, resume bit for bit, death of a rank, another layout afterwards."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_infer.contracts.training import TrainerSpec, TrainResult
from relax_infer.training import read_ledger
from relax_infer.training.hf_folder import read_tensors
from tests.training.conftest import make_spec
from tests.training.groups import run_group
from tests.transfer.tables import scored_table, write_table

pytestmark = [pytest.mark.real, pytest.mark.wide, pytest.mark.timeout(600)]

TWO: dict[str, Any] = {"ranks": 2}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("tables")
    found = {step: str(folder / f"{step}.arrow") for step in (1, 2, 3)}
    for step, path in found.items():
        write_table(scored_table(groups=4, samples=3, seed=step), path)
    return found


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tables: dict[int, str]
) -> list[TrainResult]:
    """Three steps by two data parallel ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    spec = make_spec(folder / "store", model_folder, **TWO)
    first, second = run_group(folder / "group", spec, tables, [1, 2, 3])
    assert first == second
    return first


@pytest.fixture(scope="module")
def after_a_death(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, tables: dict[int, str]
) -> TrainerSpec:
    """A run of two ranks, one of which died when step 2 was saved and not committed."""
    folder = tmp_path_factory.mktemp("death")
    spec = make_spec(folder / "store", model_folder, **TWO)
    run_group(folder / "dying", spec, tables, [1, 2], deadly=(1, 2, "saved"))
    assert read_ledger(spec.run).step == 1
    return spec


def test_a_group_goes_on_after_the_death_of_a_rank_to_the_same_bits(
    tmp_path: Path,
    whole: list[TrainResult],
    after_a_death: TrainerSpec,
    tables: dict[int, str],
) -> None:
    spec = _copied(after_a_death, tmp_path)
    results, _ = run_group(tmp_path / "group", spec, tables, [1, 2, 3])
    assert [result.repeated for result in results] == [True, False, False]
    assert [r.weights.digest for r in results] == [r.weights.digest for r in whole]
    assert [entry.result.step for entry in read_ledger(spec.run).entries] == [1, 2, 3]
    assert not list((tmp_path / "store" / "run" / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize(
    "layout",
    [{"ranks": 1}, {"ranks": 2, "pipeline_parallel": 2}],
    ids=["one-rank", "two-stages"],
)
def test_another_layout_of_ranks_goes_on_from_the_checkpoint(
    tmp_path: Path,
    whole: list[TrainResult],
    after_a_death: TrainerSpec,
    tables: dict[int, str],
    layout: dict[str, Any],
) -> None:
    spec = _copied(after_a_death, tmp_path).model_copy(update=layout)
    results = run_group(tmp_path / "group", spec, tables, [1, 2, 3])[0]
    assert [result.repeated for result in results] == [True, False, False]
    assert results[0].weights.digest == whole[0].weights.digest
    ours, wanted = (_weights(each[2]) for each in (results, whole))
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)


def _copied(spec: TrainerSpec, tmp_path: Path) -> TrainerSpec:
    shutil.copytree(spec.run.store.removeprefix("file://"), tmp_path / "store")
    run = spec.run.model_copy(update={"store": (tmp_path / "store").as_uri()})
    return spec.model_copy(update={"run": run})


def _weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return read_tensors(Path(result.weights.uri.removeprefix("file://")))
