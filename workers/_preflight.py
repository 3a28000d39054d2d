"""What has to be true before the local stack starts, and ports that stay ours."""

import random
import shutil
import socket
import sys
from pathlib import Path
from typing import Self

from relax_infer.contracts.failures import PermanentError

HOST = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20000
_GIB = 1 << 30


class StackError(PermanentError):
    """The local stack cannot be started or found as asked; nothing of this attempt is left."""


def binary(name: str) -> str:
    """Path of a program of this environment.

    Raises:
        StackError: it is neither beside this Python nor on PATH.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise StackError(
            f"The program `{name}` is missing: not in {beside.parent}, not on PATH.",
            cure="Install the project with `make install` and use its .venv.",
        )
    return found


def check_memory(wanted_gib: float) -> None:
    """
    Raises:
        StackError: less memory is free than wanted.
    """
    free = free_memory() / _GIB
    if free < wanted_gib:
        raise StackError(
            f"{free:.1f} GiB of memory are free, {wanted_gib:g} GiB are wanted.",
            cure="End other programs, or ask for less with --memory-gib if your recipe needs less.",
        )


def free_memory() -> int:
    """Bytes that this process and its children may still use, the container's limit included."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    host = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            text, taken = Path(limit).read_text().strip(), int(Path(used).read_text())
        except OSError:
            continue
        if text != "max":
            host = min(host, max(int(text) - taken, 0))
    return host


class Ports:
    """Ports that were free a moment ago, claimed until the block ends, when servers hold them.

    They come from below the range that the kernel gives to outgoing connections: while a server
    is down, none of its own clients can be handed its port.
    """

    def __enter__(self) -> Self:
        self._claims: list[socket.socket] = []
        return self

    def __exit__(self, *_: object) -> None:
        for claim in self._claims:
            claim.close()

    def choose(self, what: str, asked: int = 0, *preferred: int) -> int:
        """The port asked for, else the first free one of those preferred, else any.

        Raises:
            StackError: the port that was asked for is in use, or none is free.
        """
        if asked:
            if not self._claim(asked):
                raise StackError(
                    f"Port {asked} for {what} is in use on {HOST}.",
                    cure="End what listens there, or leave the option out: a free one is chosen.",
                )
            return asked
        for port in preferred:
            if port and self._claim(port):
                return port
        for port in random.sample(range(_LOWEST, _lowest_ephemeral()), 200):
            if self._claim(port):
                return port
        raise StackError(f"No free port for {what} on {HOST} from {_LOWEST} up.")

    def _claim(self, port: int) -> bool:
        """A name that only one process of this machine can hold; it ends with its holder."""
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0relax-port-{port}")
        except OSError:
            claim.close()
            return False
        if not _free(port):
            claim.close()
            return False
        self._claims.append(claim)
        return True


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of an earlier listener that wait to expire do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _lowest_ephemeral() -> int:
    lowest = int(_EPHEMERAL.read_text().split()[0])
    return lowest if lowest > _LOWEST + 1000 else 65536
