"""The process that makes one model: ``python -m relax_infer.tiny._maker NAME SEED FOLDER``.

It holds the model's lock while it works, so that of two processes that want a model one makes it
and the other finds it made; a maker whose parent was killed still finishes what it began.
"""

import fcntl
import json
import shutil
import sys
import tempfile
from pathlib import Path

from relax_infer.contracts.failures import PermanentError
from relax_infer.tiny.lessons import check_quality, folder_name, lesson, seed_of
from relax_infer.tiny.models import REFUSED
from relax_infer.tiny.task import HELD_OUT

FURTHER_SEEDS = 2


def make(name: str, run_seed: int, folder: Path) -> None:
    """The model's folder, whole; does nothing if it is there."""
    final = folder / folder_name(name, run_seed)
    with (folder / f".{final.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists():
            return
        for left_by_a_killed_maker in folder.glob(f".{final.name}.*.tmp"):
            shutil.rmtree(left_by_a_killed_maker)
        beside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=folder))
        try:
            _fill(beside, name, seed_of(name, run_seed))
            beside.chmod(0o755)
            beside.rename(final)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _fill(folder: Path, name: str, seed: int) -> None:
    """Make the model. One that does not vary with the run is made from the next seed if it did not
    turn out: another processor's arithmetic may end in another place."""
    # Here and not above: a maker that only waits for another one needs no torch.
    import torch

    from relax_infer.tiny import _training
    from relax_infer.tiny._tokenizer import hugging_face_tokenizer

    plan = lesson(name)

    def told(update: int, loss: float) -> None:
        print(f"{name}: update {update} of {plan.updates}, loss {loss:.3f}", flush=True)

    torch.set_num_threads(1)
    tried, last = seed, seed if plan.seed is None else seed + FURTHER_SEEDS
    while True:
        model = _training.new_model(tried)
        _training.teach(model, plan, tried, told)
        accuracy = _training.accuracy(name, model)
        print(f"{name}: {accuracy:.3f} of {HELD_OUT} held-out problems", flush=True)
        try:
            check_quality(name, tried, accuracy)
        except PermanentError:
            if tried == last:
                raise
            tried += 1
        else:
            break
    model.save_pretrained(folder)
    hugging_face_tokenizer().save_pretrained(folder)
    measured = {"model": name, "seed": tried, "problems": HELD_OUT, "accuracy": accuracy}
    (folder / "held_out.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    try:
        make(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    except PermanentError as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(REFUSED)
