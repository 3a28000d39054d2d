"""The local stack as its home folder records it."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_infer.cli._errors import CommandError

FILE = "stack.json"
_LAST = "last.json"
_START_TIME = 19
"""Index of a process's start, in clock ticks since boot, after the name in /proc/<pid>/stat."""


@dataclass(frozen=True)
class LocalStack:
    """What ``up`` wrote down."""

    stack: str
    home: Path
    temporal_address: str
    temporal_ui: str
    temporal_namespace: str
    ray_address: str
    processes: dict[str, dict[str, Any]]
    ray_token_file: str | None = None
    """What a driver needs to join its Ray; None if that asks for nothing."""
    gpus: int | None = None
    """GPUs of its Ray head; None if the record does not say."""
    ray_folder: Path | None = None
    """Ray's sockets and logs while it runs."""

    @property
    def variables(self) -> dict[str, str]:
        """What leads Temporal's and Ray's own tools to it."""
        token = self.ray_token_file
        asked = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token} if token else {}
        return {
            "TEMPORAL_ADDRESS": self.temporal_address,
            "TEMPORAL_NAMESPACE": self.temporal_namespace,
            "RAY_ADDRESS": self.ray_address,
            **asked,
            # Else Ray looks for the loopback address on a network interface, where nobody listens.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of its processes that do not run any more."""
        return tuple(
            name
            for name, process in self.processes.items()
            if _started(process["pid"]) != process["started"]
        )


def read_stack(home: Path) -> LocalStack | None:
    """The stack of ``home``, alive or not; None if nothing was started there.

    Raises:
        CommandError: the file is there and is no such record.
    """
    path = home.absolute() / FILE
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CommandError(
            f"{path} cannot be read: {error.strerror}.", cure="Name another home with --home."
        ) from error
    try:
        document = json.loads(text)
        return LocalStack(
            stack=document["stack"],
            home=Path(document["home"]),
            temporal_address=document["temporal_address"],
            temporal_ui=document["temporal_ui"],
            temporal_namespace=document["temporal_namespace"],
            ray_address=document["ray_address"],
            processes={
                name: {"pid": int(p["pid"]), "started": p["started"], "log": str(p["log"])}
                for name, p in document["processes"].items()
            },
            ray_token_file=document.get("ray_token_file"),
            gpus=document.get("gpus"),
            ray_folder=Path(folder) if (folder := document.get("ray_folder")) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{path} is not the record of a local stack ({type(error).__name__}: {error}).",
            cure="If nothing of that stack runs, remove the file.",
        ) from error


def last_address(home: Path) -> str | None:
    """Where Temporal of the last stack of ``home`` that was ended had answered."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        port = json.loads((home / _LAST).read_text())["temporal"]
        return f"127.0.0.1:{int(port)}"
    return None


def stored_runs(home: Path) -> list[str]:
    """Names of the runs in the store of ``home``, the newest first."""
    recipes = (home / "store").glob("*/recipe.json")
    with contextlib.suppress(OSError):
        newest_first = sorted(recipes, key=lambda path: path.stat().st_mtime, reverse=True)
        return [path.parent.name for path in newest_first]
    return []


def _started(pid: int) -> int | None:
    """None for a process that is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_START_TIME])
