"""What ``/proc`` says of this host and its processes. Linux only."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_infer.contracts.base import Message
from relax_infer.contracts.host import HostIdentity

SHARED_MEMORY = "/dev/shm"
"""Where PyTorch and SGLang make it on Linux."""

_PROC = Path("/proc")
_DEAD = frozenset("ZXx")


class ProcessStamp(Message):
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks between boot and its start, as the kernel counts them."""


@dataclass(frozen=True)
class ProcessRow:
    """One live process; zombies without a living thread are left out, they hold nothing."""

    stamp: ProcessStamp
    parent: int
    session: int
    uid: int
    command: str


def this_host() -> HostIdentity:
    machine = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            machine = Path(path).read_text().strip()
        except OSError:
            continue
        if machine:
            break
    return HostIdentity(
        machine_id=machine,
        boot_id=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
        pid_namespace=(_PROC / "self/ns/pid").readlink().name,
    )


def ticks_since_boot() -> int:
    """Now, on the scale of :attr:`ProcessStamp.started`; never later than it really is."""
    seconds = float((_PROC / "uptime").read_text().split()[0])
    return int(seconds * os.sysconf("SC_CLK_TCK")) - 1


def processes() -> Iterator[ProcessRow]:
    """Every live process of this pid namespace."""
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (row := process(int(entry.name))) is not None:
            yield row


def process(pid: int) -> ProcessRow | None:
    """The live process with this pid, None if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
        uid = (_PROC / str(pid)).stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold anything, parentheses included.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if fields[0] in _DEAD and not _threads_live(pid):
        return None
    return ProcessRow(
        stamp=ProcessStamp(pid=pid, started=int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        uid=uid,
        command=head.partition("(")[2],
    )


def alive(stamp: ProcessStamp) -> bool:
    """Whether exactly this process lives."""
    row = process(stamp.pid)
    return row is not None and row.stamp == stamp


def _threads_live(pid: int) -> bool:
    """Whether a thread is left: a process whose first thread ended shows Z and holds all it held
    until the last one has gone."""
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False
    for task in tasks:
        try:
            text = (task / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text.rpartition(")")[2].split()[0] not in _DEAD:
            return True
    return False


def environment(pid: int) -> dict[bytes, bytes] | None:
    """The environment that a process was started with, None if it is gone.

    Raises:
        PermissionError: it may not be read.
    """
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def processes_with(variable: str) -> Iterator[tuple[ProcessStamp, dict[bytes, bytes]]]:
    """Live processes that were started with that variable, with all that they were started with;
    those that hide it are left out. Of the others, thousands maybe, nothing more is read."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = environment(int(entry.name))
        except PermissionError:
            continue
        if variables and variable.encode() in variables and (row := process(int(entry.name))):
            yield row.stamp, variables


def command_line(pid: int) -> str:
    """Arguments joined by spaces; empty if the process is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def shared_files(pid: int, prefix: str) -> set[str]:
    """Files of this host's shared memory, by how their names begin, that a process has mapped;
    none if it is gone."""
    try:
        lines = (_PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    paths = (fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return {path for path in paths if path.startswith(f"{SHARED_MEMORY}/{prefix}")}


def send_signal(stamp: ProcessStamp, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone. A later one with its pid is never hit."""
    try:
        descriptor = os.pidfd_open(stamp.pid)
    except ProcessLookupError:
        return False
    try:
        row = process(stamp.pid)
        if row is None or row.stamp != stamp:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
