"""A checkpoint whose files were changed is told from one that was not, by all ranks together."""

from pathlib import Path

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.training.sums import check_sums, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "critic").mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", "common.pt", "critic/__0_0.distcp"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    for rank in range(2):
        write_sums(tmp_path, rank, 2)
    (tmp_path / "ledger.json").write_text("{}")  # comes later, and is the run's
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_bit_of_any_file_is_noticed_by_some_rank(folder: Path, ranks: int):
    for rank in range(ranks):
        check_sums(folder, rank, ranks)
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".distcp", ".pt")):
        was = path.read_bytes()
        path.write_bytes(bytes([was[0] ^ 1]) + was[1:])
        refused: list[PermanentError] = []
        for rank in range(ranks):
            try:
                check_sums(folder, rank, ranks)
            except PermanentError as error:
                refused.append(error)
        [told] = refused
        assert str(path) in str(told)
        assert "--from-step" in told.cure
        path.write_bytes(was)


def test_a_file_that_is_gone_is_named_and_one_that_was_never_summed_is_not_asked_for(folder: Path):
    (folder / "common.pt").unlink()
    with pytest.raises(PermanentError, match=r"common\.pt is gone"):
        check_sums(folder, 0, 1)


def test_a_checkpoint_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    check_sums(tmp_path, 0, 1)
