"""A child process in a session of its own, known by (pid, start time) and ended with proof."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_infer.contracts.failures import TransientError, UnconfirmedError
from relax_infer.engines.host_processes import (
    ProcessRow,
    ProcessStamp,
    process,
    processes,
    send_signal,
)

_POLL = 0.05
_KILL_GRACE = 5.0


class Child:
    """At most one live process of a kind. It outlives its owner, and the next one adopts it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self._popen: subprocess.Popen[bytes] | None = None
        self._stamp: ProcessStamp | None = None

    @property
    def stamp(self) -> ProcessStamp | None:
        """Which process it is (or was, until :meth:`stop` has seen it gone)."""
        return self._stamp

    @property
    def alive(self) -> bool:
        """Whether the process itself runs; a zombie does not."""
        if self._popen is not None:
            self._popen.poll()  # a child that is not waited for stays a zombie
        return self._stamp is not None and _lives(self._stamp)

    def adopt(self, stamp: ProcessStamp | None) -> None:
        """Answer for the process of an earlier owner, and for what its session has left."""
        self._popen, self._stamp = None, stamp

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; output is appended to :attr:`log`.

        Raises:
            TransientError: it ended at once.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        row = process(self._popen.pid)
        if row is None:
            raise self.died("it started")
        self._stamp = row.stamp

    async def stop(self, grace: float = 8.0) -> None:
        """End the whole session: SIGTERM, after ``grace`` seconds SIGKILL; see it gone.

        Raises:
            UnconfirmedError: something of the session still runs.
        """
        if self._stamp is None:
            return
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL_GRACE)):
            for member in self._session(self._stamp):
                send_signal(member.stamp, number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if self._popen is not None:
                    self._popen.poll()
                if not self._session(self._stamp):
                    self._popen, self._stamp = None, None
                    return
                await asyncio.sleep(_POLL)
        left = [row.stamp.pid for row in self._session(self._stamp)]
        raise UnconfirmedError(f"{self.name}: processes {left} survived SIGKILL.")

    def died(self, doing: str) -> TransientError:
        """The error for a process that ended while it was needed."""
        return TransientError(
            f"{self.name} ended while {doing}; the end of {self.log}:\n{self.tail()}",
            cure="It is started again on the next try.",
        )

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def _session(self, stamp: ProcessStamp) -> list[ProcessRow]:
        """Live processes of the child's session, whose id is the child's pid.

        A pid is not given again while a session of that id has members; if a stranger has it now,
        the session of the child is over.
        """
        leader = process(stamp.pid)
        if leader is not None and leader.stamp != stamp:
            return []
        return [row for row in processes() if row.session == stamp.pid]


def _lives(stamp: ProcessStamp) -> bool:
    row = process(stamp.pid)
    return row is not None and row.stamp == stamp
