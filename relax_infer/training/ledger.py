"""The step ledger: which steps were trained, on what, and what came out; kept with the checkpoint.

A step is in the ledger exactly when the folder ``checkpoints/step-<n>`` of its checkpoint exists;
the rename that makes that folder appear is the one moment at which a step becomes trained.
"""

import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from relax_infer.contracts.base import Message
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.training import TrainResult
from relax_infer.training.hf_folder import sync_folder, sync_tree

LEDGER = "ledger.json"
KEPT_ENTRIES = 256
"""Of the newest steps; an older one cannot be asked again, its run is far past it."""


class LedgerEntry(Message):
    """One trained step."""

    result: TrainResult
    partition: str
    digest: str
    """Of the rows that it was trained on."""


class Ledger(Message):
    """The newest entries, oldest first."""

    entries: tuple[LedgerEntry, ...] = ()

    @property
    def step(self) -> int:
        """The last trained step; 0: none yet."""
        return self.entries[-1].result.step if self.entries else 0

    def entry(self, step: int) -> LedgerEntry | None:
        return next((e for e in self.entries if e.result.step == step), None)

    def with_entry(self, entry: LedgerEntry) -> "Ledger":
        assert entry.result.step == self.step + 1
        return Ledger(entries=(*self.entries, entry)[-KEPT_ENTRIES:])


class Checkpoints:
    """Folders ``step-<n>`` of one run. Each is complete: it is made under another name, brought
    to the disk, and renamed."""

    def __init__(self, run: RunRef) -> None:
        self.folder = run_folder(run) / "checkpoints"

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def latest(self) -> Path | None:
        """Of the highest step. The file ``latest`` names it too, for people and other tools; a
        kill may leave that one behind by a step."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint into; what an earlier attempt left is gone."""
        partial = self.unfinished(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def unfinished(self, step: int) -> Path:
        """Where the checkpoint is written before it is committed."""
        return self.folder / f"step-{step}.tmp"

    def commit(self, step: int, ledger: Ledger, keep: int, every: int = 0) -> None:
        """The checkpoint and its ledger become durable at once; of the others the newest ``keep``
        stay, and those of every ``every``-th step."""
        partial = self.unfinished(step)
        (partial / LEDGER).write_text(ledger.model_dump_json(indent=1))
        sync_tree(partial)
        partial.rename(self.path(step))
        sync_folder(self.folder)
        self._point_to(step)
        for old in self.steps()[:-keep]:
            if not _is_kept(old, every):
                shutil.rmtree(self.path(old))

    def drop_weights(self, step: int, keep: int, every: int = 0) -> None:
        """Of the weights exported up to ``step``, the newest ``keep`` stay, and those of every
        ``every``-th step. Call it when the step's checkpoint is durable."""
        folder = self.folder.parent / "weights"
        for path in folder.iterdir() if folder.is_dir() else ():
            old = int(path.name) if path.name.isdecimal() else step
            if old <= step - keep and not _is_kept(old, every):
                shutil.rmtree(path, ignore_errors=True)

    def _point_to(self, step: int) -> None:
        pointer = self.folder / "latest.tmp"
        pointer.write_text(f"step-{step}\n")
        sync_folder(self.folder)
        pointer.rename(self.folder / "latest")
        sync_folder(self.folder)

    def steps(self) -> list[int]:
        """Of the checkpoints that are kept, in order."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())


def _is_kept(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def read_ledger(run: RunRef) -> Ledger:
    """The ledger as it is on the disk; empty before the first step.

    Raises:
        PermanentError: the store is not on this host's file system, or the file is damaged.
    """
    latest = Checkpoints(run).latest()
    if latest is None:
        return Ledger()
    try:
        return Ledger.model_validate_json((latest / LEDGER).read_bytes())
    except (OSError, ValidationError) as error:
        raise PermanentError(
            f"The trainer's ledger {latest / LEDGER} cannot be read: {error}.",
            cure="Move that checkpoint away to go on from the one before it.",
        ) from error


def run_folder(run: RunRef) -> Path:
    """The run's folder in the store.

    Raises:
        PermanentError: the store is not a folder: checkpoints are written by Megatron, which
            knows file systems only.
    """
    parts = urlsplit(run.store)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise PermanentError(
            f"The trainer keeps checkpoints on a file system; staging.url is {run.store}.",
            cure="Use a file:// URL of a file system that all hosts of the run share.",
        )
    path = unquote(parts.path) if parts.scheme else run.store
    return Path(path).absolute() / run.run
