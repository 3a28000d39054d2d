"""A run that goes on from another's checkpoint: it takes over weights, optimizer and ledger.

The files are linked where they are on one file system, so it costs no space; the earlier run may be
deleted, or go on by itself.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.training.hf_folder import sync_folder, sync_tree
from relax_infer.training.ledger import LEDGER, Checkpoints, Ledger, run_folder


@dataclass(frozen=True)
class Heritage:
    """What a run begins with.

    Attributes:
        step: last one that the earlier run trained; the next one is this run's first.
        weights: of that step.
    """

    step: int
    weights: WeightsRef


def find_heritage(
    earlier: RunRef, step: int | None = None, *, target: int | None = None
) -> Heritage:
    """Of the newest checkpoint, or of the one after ``step``.

    Args:
        target: last step of the run that wants it; there must be one left to train.

    Raises:
        PermanentError: there is none, its weights are gone, or nothing is left to train; names
            what there is.
    """
    checkpoints = Checkpoints(earlier)
    kept = checkpoints.steps()
    if not kept:
        raise PermanentError(
            f"begin_from: run {earlier.run} has no checkpoint in {checkpoints.folder}.",
            cure="Name a run that has trained, and the store that it used.",
        )
    step = kept[-1] if step is None else step
    if step not in kept:
        raise PermanentError(
            f"begin_from: run {earlier.run} keeps no checkpoint of step {step}; it has"
            f" {', '.join(map(str, kept))} (train.keep_checkpoints).",
            cure="Name one of these steps.",
        )
    if target is not None and target <= step:
        raise PermanentError(
            f"begin_from: run {earlier.run} has trained step {step}, the new run is to end with"
            f" step {target}: nothing is left to train.",
            cure="Raise steps: they count from the first run's first step.",
        )
    entry = _ledger(checkpoints.path(step)).entry(step)
    if entry is None:
        raise PermanentError(f"begin_from: the ledger in {checkpoints.path(step)} lacks the step.")
    if not _folder(entry.result.weights).is_dir():
        raise PermanentError(
            f"begin_from: the weights of step {step} are gone: {entry.result.weights.uri}."
        )
    return Heritage(step, entry.result.weights)


def take_over(earlier: RunRef, run: RunRef, heritage: Heritage) -> Heritage:
    """The same in the folder of ``run``. Idempotent; a kill leaves nothing half made.

    Raises:
        PermanentError: a file cannot be linked or copied.
    """
    step = heritage.step
    version = heritage.weights.version
    uri = f"{run.store.rstrip('/')}/{run.run}/weights/{version}"
    own = heritage.weights.model_copy(update={"uri": uri})
    source = Checkpoints(earlier).path(step)
    ledger = _ledger(source)
    entries = tuple(
        entry.model_copy(update={"result": entry.result.model_copy(update={"weights": own})})
        if entry.result.step == step
        else entry
        for entry in ledger.entries
    )
    try:
        _link(_folder(heritage.weights), run_folder(run) / "weights" / f"{version}")
        _link(source, Checkpoints(run).path(step), {LEDGER: Ledger(entries=entries)})
    except OSError as error:
        raise PermanentError(
            f"begin_from: step {step} of run {earlier.run} cannot be taken over: {error}",
            cure="Is there room in the store, and may the worker read the earlier run's files?",
        ) from error
    return Heritage(step, own)


def _folder(weights: WeightsRef) -> Path:
    return Path(unquote(urlsplit(weights.uri).path))


def _link(source: Path, target: Path, instead: dict[str, Ledger] | None = None) -> None:
    """The tree under another name, whole or not at all; files of ``instead`` are written anew."""
    if target.is_dir():
        return
    partial = target.with_name(f"{target.name}.taken")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        place = partial / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if instead is not None and path.name in instead and path.parent == source:
            place.write_text(instead[path.name].model_dump_json(indent=1))
            continue
        try:
            os.link(path, place)
        except OSError:  # another file system, or one without links
            shutil.copy2(path, place)
    sync_tree(partial)
    partial.rename(target)
    sync_folder(target.parent)


def _ledger(checkpoint: Path) -> Ledger:
    try:
        return Ledger.model_validate_json((checkpoint / LEDGER).read_bytes())
    except (OSError, ValidationError) as error:
        raise PermanentError(
            f"begin_from: {checkpoint / LEDGER} cannot be read: {error}"
        ) from error
