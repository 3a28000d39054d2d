"""Homes whose stacks are always ended, and a look at /proc that shares nothing with `down`."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.local import down


@pytest.fixture
def new_home() -> Iterator[Callable[[], Path]]:
    """Makes empty homes; what runs in them at the end of the test is ended."""
    homes: list[Path] = []

    def make() -> Path:
        homes.append(Path(tempfile.mkdtemp(prefix="relax-stack-")))
        return homes[-1]

    yield make
    for home in homes:
        assert not down(home, say=lambda _: None).left
        shutil.rmtree(home)


def marked(stack: str) -> dict[int, str]:
    """Live processes that carry RELAX_STACK of this stack: pid and command."""
    return _with_variable(f"RELAX_STACK={stack}")


def marked_home(home: Path) -> dict[int, str]:
    """Those of any stack that was started in this home."""
    return _with_variable(f"RELAX_HOME={home}")


def _with_variable(variable: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # gone, or another user's
    return found


def record(home: Path) -> dict[str, object]:
    return json.loads((home / "stack.json").read_text())


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.02)
