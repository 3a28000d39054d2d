"""Starting processes that carry the stack's marker, finding and ending them. Linux only."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relax_infer.engines.host_processes import (
    ProcessRow,
    ProcessStamp,
    environment,
    process,
    processes,
    send_signal,
)
from relax_infer.engines.release import MARKER as ENGINE_MARKER
from workers._preflight import StackError

MARKER = "RELAX_STACK"
_POLL = 0.05
_BETWEEN_SCANS = 0.1
_LOG_LINES = 15

_ours: list[subprocess.Popen[bytes]] = []
"""Children of this process that nobody has waited for yet."""


def launch(
    name: str, command: Sequence[str], variables: Mapping[str, str], log: Path
) -> ProcessStamp:
    """Start a process in a session of its own; what it prints is appended to ``log``.

    Raises:
        StackError: it ended at once.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _ours.append(child)
    row = process(child.pid)
    if row is None:
        raise ended_early(name, log)
    return row.stamp


def lives(stamp: ProcessStamp) -> bool:
    """Whether exactly this process runs; a zombie does not."""
    _reap()
    row = process(stamp.pid)
    return row is not None and row.stamp == stamp


def wait_gone(stamps: Iterable[ProcessStamp], timeout: float) -> bool:
    """Whether all of them are gone within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    waiting = list(stamps)
    while waiting := [stamp for stamp in waiting if lives(stamp)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def stack_processes(stack: str, recorded: Iterable[ProcessStamp]) -> list[ProcessRow]:
    """Live processes of a stack: by marker, by recorded process, by session, by descent.

    This process and those it runs under are never among them.
    """
    _reap()
    rows = {row.stamp.pid: row for row in processes()}
    known = {stamp.pid: stamp for stamp in recorded}
    spared = _line_of(os.getpid(), rows)
    found: dict[int, ProcessRow] = {}
    for row in rows.values():
        if row.stamp == known.get(row.stamp.pid) or marks(row).get(MARKER) == stack:
            found[row.stamp.pid] = row
            continue
        leader, stamp = rows.get(row.session), known.get(row.session)
        # A session number is free again once its last member is gone, then it may be a stranger's.
        if stamp is not None and (leader is None or leader.stamp == stamp):
            found[row.stamp.pid] = row
    for row in rows.values():
        if any(pid in found for pid in _line_of(row.parent, rows)):
            found[row.stamp.pid] = row
    return [row for pid, row in found.items() if pid not in spared]


def engine_leaders(rows: Iterable[ProcessRow]) -> list[ProcessRow]:
    """First processes of engine servers; they end the rest of their engine when asked."""
    return [row for row in rows if row.stamp.pid == row.session and ENGINE_MARKER in marks(row)]


def marks(row: ProcessRow) -> dict[str, str]:
    """The markers that a process carries; none if it is gone or another user's."""
    try:
        variables = environment(row.stamp.pid) or {}
    except PermissionError:
        return {}
    return {
        name: variables[name.encode()].decode(errors="replace")
        for name in (MARKER, ENGINE_MARKER)
        if name.encode() in variables
    }


def end(stamps: Sequence[ProcessStamp], grace: float) -> None:
    """SIGTERM, then up to ``grace`` seconds. Some may live on."""
    for stamp in stamps:
        send_signal(stamp, signal.SIGTERM)
    wait_gone(stamps, grace)


def sweep(
    stack: str, recorded: Sequence[ProcessStamp], timeout: float
) -> tuple[set[int], set[int]]:
    """Kill until two scans in a row find nothing.

    Returns:
        Pids that were killed, and pids that were still there after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    killed: set[int] = set()
    empty = 0
    while True:
        rows = stack_processes(stack, recorded)
        empty = 0 if rows else empty + 1
        if empty == 2:
            return killed, set()
        if time.monotonic() > deadline:
            return killed, {row.stamp.pid for row in rows}
        killed |= {row.stamp.pid for row in rows if send_signal(row.stamp, signal.SIGKILL)}
        time.sleep(_BETWEEN_SCANS)


def ended_early(name: str, log: Path) -> StackError:
    """For a process that ended while it started."""
    return StackError(f"{name} ended while it started; the end of its log {log}:\n{_tail(log)}")


def slow(name: str, log: Path, seconds: float) -> StackError:
    """For a process that runs and does not answer."""
    return StackError(
        f"{name} did not answer within {seconds:.0f} s; the end of its log {log}:\n{_tail(log)}",
        cure="Is the machine overloaded? Try again.",
    )


def _tail(path: Path) -> str:
    try:
        with path.open(errors="replace") as lines:
            return "".join(deque(lines, _LOG_LINES))
    except FileNotFoundError:
        return "(no log)"


def _reap() -> None:
    _ours[:] = [child for child in _ours if child.poll() is None]


def _line_of(pid: int, rows: Mapping[int, ProcessRow]) -> set[int]:
    """A process and those it descends from, without pid 1."""
    line: set[int] = set()
    while pid > 1 and pid not in line:
        line.add(pid)
        row = rows.get(pid)
        pid = row.parent if row is not None else 0
    return line
