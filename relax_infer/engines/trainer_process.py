"""What a trainer's process leaves on its host: whether it may hold a GPU, and which.

The trainer writes it; whoever wants to start something on the same GPU reads it.
"""

import os

import psutil

from relax_infer.contracts.base import Message
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines import host_processes
from relax_infer.engines.host_processes import ProcessStamp

RESIDENCE = ".residence.json"
"""How the name of its file ends."""


class Residence(Message):
    """The trainer process of this host that may hold the device."""

    pid: int
    started: float
    """Unix seconds at which that process was created, by the clock as it was then."""
    ticks: int | None = None
    """Clock ticks from boot to its start: they tell it from a later process with its pid, also
    where the clock was set since. None in files of earlier versions."""
    pid_namespace: str
    boot_id: str = ""
    """Of the kernel that it ran under; empty in files of earlier versions."""
    resident_under: FenceToken | None = None
    """Token under which it loaded the device; None: it let go since."""
    run: str = ""
    holder: str = ""
    devices: tuple[str, ...] = ()
    """As :attr:`BundleBinding.device` names them. Earlier versions named none: then other runs
    cannot tell where it is."""

    @property
    def seen_from_here(self) -> bool:
        """Whether its pid means the same process here."""
        return self.pid_namespace == pid_namespace()

    @property
    def lives(self) -> bool:
        """As another process of this pid namespace."""
        if self.pid == os.getpid():
            return False
        if self.booted_since:
            return False
        if self.ticks is not None:
            return host_processes.alive(ProcessStamp(pid=self.pid, started=self.ticks))
        try:
            process = psutil.Process(self.pid)
            same = process.create_time() == self.started
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def booted_since(self) -> bool:
        """Whether it ran under another boot than this, and so has none of this host's devices."""
        if self.boot_id:
            return self.boot_id != host_processes.this_host().boot_id
        return self.started < psutil.boot_time()


def pid_namespace() -> str:
    return host_processes.this_host().pid_namespace
