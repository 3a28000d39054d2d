"""Digests of a checkpoint's files: one that was changed after it was saved is not trained on."""

import hashlib
import json
from pathlib import Path

from relax_infer.contracts.failures import PermanentError

_SUMS = "sums.{rank}.json"


def write_sums(folder: Path, rank: int, ranks: int) -> None:
    """This rank's share of them, once every rank has written its part of the checkpoint."""
    names = _share(_files(folder), rank, ranks)
    told = {name: _digest(folder / name) for name in names}
    (folder / _SUMS.format(rank=rank)).write_text(json.dumps(told, indent=1))


def check_sums(folder: Path, rank: int, ranks: int) -> None:
    """This rank's share, whatever their number was then. A checkpoint of an earlier version has no
    digests, and is taken as it is.

    Raises:
        PermanentError: a file is gone, or not what was saved.
    """
    known: dict[str, str] = {}
    for path in sorted(folder.glob(_SUMS.format(rank="*"))):
        known |= json.loads(path.read_text())
    for name in _share(sorted(known), rank, ranks):
        path = folder / name
        if not path.is_file():
            raise _spoilt(path, "is gone")
        if _digest(path) != known[name]:
            raise _spoilt(path, "was changed after it was saved: its digest differs")


def _files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith("sums."))


def _share(names: list[str], rank: int, ranks: int) -> list[str]:
    return names[rank::ranks]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spoilt(path: Path, what: str) -> PermanentError:
    return PermanentError(
        f"{path} {what}. Nothing is trained on it.",
        cure="Bring the file back from a copy, or start a run from an earlier checkpoint:"
        " `relax-infer run RECIPE --from RUN --from-step N`.",
    )
