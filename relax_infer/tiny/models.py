"""The three models as Hugging Face folders, made where they are missing."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.tiny.lessons import folder_name, lesson

Progress = Callable[[str], None]

REFUSED = 3
"""Exit code of a maker whose model is not good enough; the reason is its last line."""

_SHIM = Path(__file__).parents[1] / "engines" / "cpu_shim"
_DEADLINE = 900.0
"""Seconds for one model; the longest takes some 40 on an idle core."""


def ensure_models(
    folder: Path,
    *,
    seed: int,
    names: Sequence[str] = ("policy", "genrm", "teacher"),
    progress: Progress | None = None,
) -> dict[str, Path]:
    """Name → folder with config, tokenizer, safetensors and ``held_out.json``.

    What is missing is made, each model in its own process and on its own core; about 40 s for all
    three on two idle cores. One machine makes the same bytes every time. A folder appears whole or
    not at all, and two callers at once make a model once.

    Args:
        folder: kept between runs; made if it is not there.
        seed: of the weak policy, whose folder is ``policy-<seed>``; the other two do not vary.
        names: of ``policy``, ``genrm``, ``teacher``.
        progress: told a line now and then, from several threads but never two at once.

    Raises:
        PermanentError: an unknown name, or a model that is not good enough to be used.
        TransientError: a maker process was killed or took too long.
    """
    folder = folder.absolute()
    paths = {name: folder / folder_name(name, seed) for name in dict.fromkeys(names)}
    missing = sorted(
        (name for name, path in paths.items() if not path.exists()),
        key=lambda name: lesson(name).updates * lesson(name).batch,
        reverse=True,
    )
    if not missing:
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    tell = _one_at_a_time(progress)
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        for made in [pool.submit(_make, name, seed, folder, tell) for name in missing]:
            made.result()
    return paths


def _make(name: str, seed: int, folder: Path, tell: Progress) -> None:
    tell(f"{name}: being made in {folder / folder_name(name, seed)}")
    command = [sys.executable, "-m", "relax_infer.tiny._maker", name, str(seed), str(folder)]
    with tempfile.TemporaryFile("w+") as errors, _running(command, errors) as process:
        timer = threading.Timer(_DEADLINE, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                tell(line.rstrip())
            code = process.wait()
        finally:
            timer.cancel()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if code == 0:
        return
    if code < 0:
        raise TransientError(f"the maker of the tiny {name} was ended by signal {-code}")
    refused = code == REFUSED
    reason = lines[-1] if refused and lines else "\n".join(lines[-15:])
    raise PermanentError(
        reason if refused else f"the tiny {name} could not be made (exit code {code}):\n{reason}"
    )


@contextlib.contextmanager
def _running(command: list[str], errors: Any) -> Any:
    """The process, ended when the caller leaves without having waited for it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(_SHIM), os.environ.get("PYTHONPATH")) if part
        ),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _one_at_a_time(progress: Progress | None) -> Progress:
    lock = threading.Lock()

    def tell(line: str) -> None:
        if progress is not None:
            with lock:
                progress(line)

    return tell
