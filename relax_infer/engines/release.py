"""Release proof: that nothing of an engine's incarnation is left on its host.

A device gives its memory back when the last process that holds a context on it is gone, so the
proof is about processes. It works on a dead engine, on a silent one and on one whose actor died.
"""

import os
import signal
import time
from collections.abc import Sequence

from pydantic import Field

from relax_infer.contracts.base import Message
from relax_infer.contracts.failures import (
    InferenceCleanupError,
    InferenceRecoveryRequired,
    UnconfirmedError,
)
from relax_infer.contracts.host import HostIdentity
from relax_infer.engines import host_processes
from relax_infer.engines.host_processes import ProcessRow, ProcessStamp

MARKER = "RELAX_ENGINE_INCARNATION"
"""Environment variable that every process of an engine carries."""

_BETWEEN_SCANS = 0.1
_LOOKS = 5
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_GRACE = 3.0
"""Seconds for Python's resource trackers to remove shared memory after their parents died."""


class EngineProcesses(Message):
    """One incarnation of an engine, as it was recorded on its host before it could load."""

    incarnation: str
    """Value of the marker."""
    session: int
    """Session id: the pid of the process that was started; 0 before it was."""
    tree: tuple[ProcessStamp, ...]
    """Processes seen so far; the first is the session leader. Empty before it was started."""
    host: HostIdentity
    not_before: int
    """Clock ticks since boot just before it was started: no older process belongs to it."""
    node: str = ""
    """Node or container that it was bound on, for people; empty in files of earlier versions."""

    @property
    def where(self) -> str:
        return f" on node/container {self.node}" if self.node else ""


class ReleaseProof(Message):
    """Nothing of the incarnation is left."""

    incarnation: str
    at: float
    """Unix seconds."""
    scans: int
    """Scans of the host; the last two found nothing. 0: the host was booted since."""
    stopped: tuple[int, ...] = Field(default=())
    """Pids that were still alive and had to be killed."""


def prove_release(engine: EngineProcesses, *, timeout: float = 60.0) -> ReleaseProof:
    """Stop what is left of ``engine`` on this host and prove that nothing is.

    Looks for the union of three: the marker in a process's environment, the session id, and the
    recorded (pid, start time) tree. Kills what it finds and scans again until two scans in a row
    find nothing. A host that booted since is proof by itself. Blocks; run it in a thread.

    Raises:
        InferenceRecoveryRequired: another host, or a process that may belong to the engine and
            cannot be told.
        InferenceCleanupError: processes that did not die within ``timeout`` seconds. Both are
            UnconfirmedErrors: nothing may be released on the strength of them.
    """
    here = host_processes.this_host()
    if here.booted_since(engine.host):
        return ReleaseProof(incarnation=engine.incarnation, at=time.time(), scans=0)
    if here != engine.host:
        raise InferenceRecoveryRequired(
            f"Engine incarnation {engine.incarnation} ran on host {engine.host}{engine.where}, this"
            f" is {here}.",
            cure="The proof has to run on the engine's own host and in its pid namespace.",
        )
    deadline = time.monotonic() + timeout
    stopped: set[int] = set()
    scans = empty = 0
    trackers_until = time.monotonic() + _TRACKER_GRACE
    while True:
        found = find_processes(engine)
        scans += 1
        empty = 0 if found else empty + 1
        if empty == 2:
            return ReleaseProof(
                incarnation=engine.incarnation,
                at=time.time(),
                scans=scans,
                stopped=tuple(sorted(stopped)),
            )
        if time.monotonic() > deadline:
            raise InferenceCleanupError(
                f"Processes {_names(found)} of engine incarnation {engine.incarnation}"
                f"{engine.where} are alive {timeout:.0f} s after they were killed.",
                cure="A process that SIGKILL does not end waits in the kernel, often in a driver:"
                " look at dmesg and nvidia-smi on its host.",
            )
        for row in found:
            if _is_tracker(row) and time.monotonic() < trackers_until:
                continue
            if host_processes.send_signal(row.stamp, signal.SIGKILL):
                stopped.add(row.stamp.pid)
        time.sleep(_BETWEEN_SCANS)


def find_processes(engine: EngineProcesses) -> list[ProcessRow]:
    """Live processes of this host that belong to ``engine``.

    Raises:
        UnconfirmedError: a process may belong to it and nothing tells for certain.
    """
    rows = list(host_processes.processes())
    recorded = set(engine.tree)
    leader = next((row for row in rows if row.stamp.pid == engine.session), None)
    recycled = leader is not None and leader.stamp not in recorded
    found: list[ProcessRow] = []
    for row in rows:
        if row.stamp in recorded:
            found.append(row)
            continue
        mark, readable = _mark(row, engine.not_before)
        if mark == engine.incarnation:
            found.append(row)
        elif row.session == engine.session and engine.session and not recycled:
            # Without our mark it is a stranger in a session number used again, or a process of
            # ours that cleared its environment; or it is starting a program just now.
            found.extend(_settled(row, engine, "is in its session and carries no mark"))
        elif not readable:
            found.extend(_settled(row, engine, "started later and hides its environment"))
    return found


def check_marks(engine: EngineProcesses) -> tuple[ProcessStamp, ...]:
    """The engine's live process tree, after checking that every member carries the marker.

    Raises:
        UnconfirmedError: one does not, so a later release proof could miss it.
    """
    rows = {row.stamp.pid: row for row in host_processes.processes()}
    members = [row for row in rows.values() if _descends(row, engine.session, rows)]
    bare = [row for row in members if _mark(row, 0)[0] != engine.incarnation]
    for _ in range(_LOOKS):
        if not bare:
            break
        # One that starts a program just now shows no environment for a moment.
        time.sleep(_BETWEEN_SCANS / _LOOKS)
        gone = [row for row in bare if not host_processes.alive(row.stamp)]
        members = [row for row in members if row not in gone]
        bare = [r for r in bare if r not in gone and _mark(r, 0)[0] != engine.incarnation]
    if bare:
        raise UnconfirmedError(
            f"Processes {_names(bare)} of engine incarnation {engine.incarnation}{engine.where} do"
            f" not show {MARKER} in their environment.",
            cure="Is SPT_NOENV=1 set for the engine? Without it setproctitle erases the marker.",
        )
    members.sort(key=lambda row: (row.stamp.pid != engine.session, row.stamp.started))
    return tuple(row.stamp for row in members)


def _descends(row: ProcessRow, root: int, rows: dict[int, ProcessRow]) -> bool:
    seen: set[int] = set()
    current: ProcessRow | None = row
    while current is not None and current.stamp.pid not in seen:
        if root in (current.stamp.pid, current.session):
            return True
        seen.add(current.stamp.pid)
        current = rows.get(current.parent)
    return False


def _mark(row: ProcessRow, not_before: int) -> tuple[str | None, bool]:
    """Marker of a process (None: it has none or is gone), and whether that could be told.

    Another user's processes, and those older than the engine, are not the engine's.
    """
    try:
        variables = host_processes.environment(row.stamp.pid)
    except PermissionError:
        return None, row.uid != os.getuid() or row.stamp.started < not_before
    value = (variables or {}).get(MARKER.encode())
    return None if value is None else value.decode(errors="replace"), True


def _settled(row: ProcessRow, engine: EngineProcesses, why: str) -> list[ProcessRow]:
    """The row if it turns out to be the engine's, nothing if it is gone; else it is ambiguous."""
    for _ in range(_LOOKS):
        time.sleep(_BETWEEN_SCANS / _LOOKS)
        if (now := host_processes.process(row.stamp.pid)) is None or now.stamp != row.stamp:
            return []
        if _mark(row, 0)[0] == engine.incarnation:
            return [row]
    raise InferenceRecoveryRequired(
        f"Process {_names([row])}{engine.where} {why}:"
        f" it may or may not belong to engine incarnation {engine.incarnation}"
        f" (session {engine.session}).",
        cure="Look at it; end it if it is the engine's, then ask for the proof again.",
    )


def _is_tracker(row: ProcessRow) -> bool:
    return _RESOURCE_TRACKER in host_processes.command_line(row.stamp.pid)


def _names(rows: Sequence[ProcessRow]) -> str:
    return ", ".join(f"{row.stamp.pid} ({row.command})" for row in rows)
