"""``<home>/stack.json``: what was started, written as it is started, so that it can be ended."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from relax_infer.contracts.base import Message
from relax_infer.engines.host_processes import ProcessStamp
from workers._preflight import StackError

_FILE, _LOCK, _LAST = "stack.json", "stack.lock", "last.json"


class LastStack(Message):
    """What the next stack of a home has from the last one; 0: there was none."""

    temporal: int = 0
    """Port: whoever watches a run finds it there again."""
    ui: int = 0
    gpus: int = 0
    """Runs that have not ended are bound to so many."""


class ProcessRecord(ProcessStamp):
    """A process of the stack; each is the leader of its own session."""

    log: str
    """What it prints is appended here."""

    @property
    def stamp(self) -> ProcessStamp:
        return ProcessStamp(pid=self.pid, started=self.started)


class StackRecord(Message):
    """The file's content. Its keys are an interface: see :mod:`workers.local`."""

    stack: str
    """RELAX_STACK of every process of this stack; a new one at every ``up``."""
    home: str
    boot: str
    """Boot id of the machine: after another boot the processes below are others'."""
    temporal_address: str
    temporal_ui: str
    temporal_metrics: str
    worker_metrics: str = ""
    """Of runs, leases, replicas and training; none in records of earlier versions."""
    worker_sdk_metrics: str = ""
    """Of the Temporal SDK in the worker."""
    temporal_namespace: str = "default"
    ray_address: str
    ray_folder: str
    """Ray's sockets and logs while it runs."""
    ray_token_file: str
    """What a driver needs to join Ray; readable by this user alone, gone after ``down``."""
    gpus: int
    worker: bool
    """Whether a worker belongs to the stack."""
    ready: bool = False
    """Whether ``up`` has finished."""
    processes: dict[str, ProcessRecord] = Field(default_factory=dict)

    @property
    def expected(self) -> tuple[str, ...]:
        return ("temporal", "ray", "worker") if self.worker else ("temporal", "ray")


def read(home: Path) -> StackRecord | None:
    """The record of a home, None if nothing was started there.

    Raises:
        StackError: the file is not one.
    """
    path = home / _FILE
    try:
        return StackRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StackError(
            f"{path} is not the record of a local stack: {error.errors()[0]['msg']}.",
            cure="If no process carries RELAX_HOME of this folder, remove the file.",
        ) from error


def write(record: StackRecord) -> None:
    path = Path(record.home) / _FILE
    fresh = path.with_suffix(".new")
    fresh.write_text(record.model_dump_json(indent=2) + "\n")
    fresh.replace(path)


def remove(home: Path) -> None:
    """What runs of it need from the next one is kept."""
    record = read(home)
    if record is not None:
        last = LastStack(
            temporal=_port(record.temporal_address),
            ui=_port(record.temporal_ui.rstrip("/")),
            gpus=record.gpus,
        )
        (home / _LAST).write_text(last.model_dump_json() + "\n")
    (home / _FILE).unlink(missing_ok=True)


def last_stack(home: Path) -> LastStack:
    """The last one of this home that was ended."""
    try:
        return LastStack.model_validate_json((home / _LAST).read_bytes())
    except (OSError, ValidationError):
        return LastStack()


def _port(address: str) -> int:
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def was_used(home: Path) -> bool:
    """Whether an ``up`` or ``down`` ever was at work there."""
    return (home / _LOCK).exists() or (home / _FILE).exists()


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """One ``up`` or ``down`` at a time in a home.

    Raises:
        StackError: another one is at work there, or the folder cannot be made.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StackError(
            f"The folder {home} cannot be used: {error.strerror}.",
            cure="Name another with --home or RELAX_HOME.",
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StackError(
            f"Another `up` or `down` is at work in {home}.", cure="Wait until it has ended."
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
