"""Files on an engine's own host: who may hold its GPUs, and the highest token it has seen.

They outlive the engine's actor. A holder is written before its process is started and removed
only on release proof, so an actor that finds one knows that an engine of an earlier actor may be
there, whatever Ray says.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.engines.canary import Canary
from relax_infer.engines.folders import folder_of
from relax_infer.engines.release import EngineProcesses

_M = TypeVar("_M", bound=Message)
_SOCKET_LIMIT = 100


class Holder(Message):
    """One incarnation of an engine on this host: all of it, or one node's part."""

    engine_id: str
    run: str = ""
    devices: tuple[str, ...] = ()
    """Of this node, as :attr:`BundleBinding.device` names them."""
    processes: EngineProcesses
    base_url: str | None
    """Public, fenced address; a follower has none."""
    socket: str
    """Management side; a follower opens none."""
    scratch: str | None = None
    """Folder of what its processes write in passing; it goes when they are proved gone."""
    shared: tuple[str, ...] = ()
    """Files in shared memory that go with them. SGLang removes none when it is killed, and over
    many launches they would fill the host's shared memory."""
    log: str
    """Everything its processes print."""
    request_log: str
    model_path: str
    memory_before: int | None = None
    """Bytes in use on its devices before it was started; None where there are none."""


class OwedMemory(Message):
    """What an incarnation that was ended may not have given back yet. It is written down before
    its holder goes, and removed once the memory is seen to be free."""

    devices: tuple[str, ...]
    before: int
    """Bytes in use on them before it was started."""


class SeenFence(Message):
    """The highest token seen. Counters grow per pool, so a new pool begins anew."""

    pool: str
    """Ray's id of the placement group."""
    token: FenceToken
    ended: bool = False
    """Whether its grant was released here."""


class HolderFiles:
    """The files of one node of one replica."""

    def __init__(
        self, spec: EngineGroupSpec, replica: int, pool: str = "", *, node: int = 0
    ) -> None:
        self._pool = pool
        self.folder = folder_of(spec.store, spec.run)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._name = spec.actor_name(replica, node)
        self._short = hashlib.sha256(self._name.encode()).hexdigest()[:8]

    def holder(self) -> Holder | None:
        return self._read("holder", Holder)

    def write_holder(self, holder: Holder) -> None:
        self._write("holder", holder)

    def remove_holder(self) -> None:
        """The holder, and what its incarnation left on this host."""
        if (holder := self.holder()) is not None:
            Path(holder.socket).unlink(missing_ok=True)
            for shared in holder.shared:
                Path(shared).unlink(missing_ok=True)
            if holder.scratch is not None:
                shutil.rmtree(holder.scratch, ignore_errors=True)
        self._path("holder").unlink(missing_ok=True)

    def owed(self) -> OwedMemory | None:
        return self._read("owed", OwedMemory)

    def write_owed(self, owed: OwedMemory) -> None:
        self._write("owed", owed)

    def remove_owed(self) -> None:
        self.owed_path.unlink(missing_ok=True)

    @property
    def owed_path(self) -> Path:
        return self._path("owed")

    def fence(self) -> FenceToken | None:
        seen = self._read("fence", SeenFence)
        return seen.token if seen is not None and seen.pool == self._pool else None

    def fence_memory(self) -> FenceMemory:
        seen = self._read("fence", SeenFence)
        if seen is None or seen.pool != self._pool:
            return FenceMemory()
        return FenceMemory(seen.token, ended=seen.ended)

    def write_fence(self, memory: FenceMemory) -> None:
        if memory.seen is not None:
            seen = SeenFence(pool=self._pool, token=memory.seen, ended=memory.ended)
            self._write("fence", seen)

    def canary(self) -> Canary | None:
        """The last one that was taken right after weights were loaded."""
        return self._read("canary", Canary)

    def write_canary(self, canary: Canary) -> None:
        self._write("canary", canary)

    def socket(self, incarnation: str) -> Path:
        """Path of an incarnation's management socket.

        Raises:
            PermanentError: it would be longer than a Unix socket's address may be.
        """
        path = self.folder / f"{self._short}-{incarnation[:6]}.sock"
        if len(os.fsencode(path)) >= _SOCKET_LIMIT:
            raise PermanentError(
                f"The path of the engine's socket is too long: {path}.",
                cure=f"Set TMPDIR to a shorter path than {tempfile.gettempdir()}.",
            )
        return path

    def scratch(self, incarnation: str) -> Path:
        """A new folder for what an incarnation's processes write in passing. Its path is short,
        since SGLang has sockets in it."""
        name = hashlib.sha256(f"{self._short}{incarnation}".encode()).hexdigest()[:12]
        path = self.folder.parent / f"tmp-{name}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self._name}.{kind}.json"

    def _read(self, kind: str, model: type[_M]) -> _M | None:
        try:
            return model.model_validate_json(self._path(kind).read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, kind: str, value: Message) -> None:
        path = self._path(kind)
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("w") as file:
            file.write(value.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
