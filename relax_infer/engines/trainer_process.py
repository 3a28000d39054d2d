"""What a trainer's process leaves on its host: whether it may hold a GPU, and which.

The trainer writes it; whoever wants to start something on the same GPU reads it.
"""

import os
from pathlib import Path

import psutil

from relax_infer.contracts.base import Message
from relax_infer.contracts.fence import FenceToken

RESIDENCE = ".residence.json"
"""How the name of its file ends."""


class Residence(Message):
    """The trainer process of this host that may hold the device."""

    pid: int
    started: float
    """Unix seconds at which that process was created; tells it from a later one with its pid."""
    pid_namespace: str
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
        try:
            process = psutil.Process(self.pid)
            same = process.create_time() == self.started
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def booted_since(self) -> bool:
        """Whether its host, if it is this one, has booted since it was started."""
        return self.started < psutil.boot_time()


def pid_namespace() -> str:
    return Path("/proc/self/ns/pid").readlink().name
