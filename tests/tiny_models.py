"""The tiny models of one test session, for the stacks of the next: making them takes minutes."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TINY = Path(__file__).parents[1] / "relax_infer" / "tiny"
_KEPT = Path(__file__).parents[1] / ".pytest_cache" / "tiny-models"


def _kept() -> Path:
    """Of this state of the code that makes them; one machine makes the same bytes every time."""
    code = b"".join(path.read_bytes() for path in sorted(_TINY.glob("*.py")))
    return _KEPT / hashlib.sha256(code).hexdigest()[:16]


@contextmanager
def models_kept(home: Path) -> Iterator[None]:
    """A stack in ``home`` begins with the models that an earlier one left."""
    kept, own = _kept(), home / "models"
    if kept.exists():
        shutil.copytree(kept, own)
    try:
        yield
    finally:
        for made in own.iterdir() if own.exists() else ():
            whole = made.is_dir() and not made.name.startswith(".")
            if whole and not (kept / made.name).exists():
                kept.mkdir(parents=True, exist_ok=True)
                beside = kept / f".{made.name}"
                shutil.rmtree(beside, ignore_errors=True)
                shutil.copytree(made, beside)
                beside.rename(kept / made.name)
