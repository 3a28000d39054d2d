"""What outlives a trainer's actor: the highest token it has seen, and who may hold its GPU.

The token is kept with the run's store, so that it is known on whichever host the actor is made
again, and is forgotten with the store. Who holds the GPU is kept on the GPU's own host: it is
written before anything is loaded onto the device and cleared once the device is free.
"""

import os
from pathlib import Path
from typing import TypeVar

import psutil

from relax_infer.contracts.base import Message
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceRecord, FenceToken
from relax_infer.contracts.training import TrainerSpec
from relax_infer.engines import host_processes
from relax_infer.engines.closed_grants import ClosedGrants
from relax_infer.engines.holder import folder_of
from relax_infer.engines.trainer_process import RESIDENCE, Residence
from relax_infer.training.hf_folder import sync_folder
from relax_infer.training.ledger import run_folder

_M = TypeVar("_M", bound=Message)


class TrainerFiles:
    """The two files of one rank of one run."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        here = folder_of(spec.run.store, spec.run.run)
        self._residence = here / f"{spec.actor_name(rank)}{RESIDENCE}"
        self._run, self._holder = spec.run.run, f"trainer/rank-{rank}"
        self._node = f" on node {spec.bundles[rank].node_ip}" if spec.bundles else ""
        self._devices = (spec.bundles[rank].device,) if spec.bundles else ()
        self._fence = run_folder(spec.run) / "trainer" / f"rank-{rank}.fence.json"
        self.closed = ClosedGrants(spec.run.store, spec.run.run, self._holder)

    def fence_memory(self) -> FenceMemory:
        record = _read(self._fence, FenceRecord)
        return FenceMemory() if record is None else FenceMemory(record.token, ended=record.ended)

    def write_fence(self, memory: FenceMemory) -> None:
        if memory.seen is not None:
            _write(self._fence, FenceRecord(token=memory.seen, ended=memory.ended))

    def residence(self) -> Residence | None:
        return _read(self._residence, Residence)

    def write_residence(self, resident_under: FenceToken | None) -> None:
        """Of this process."""
        host, me = host_processes.this_host(), host_processes.process(os.getpid())
        mine = Residence(
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            ticks=None if me is None else me.stamp.started,
            pid_namespace=host.pid_namespace,
            boot_id=host.boot_id,
            resident_under=resident_under,
            run=self._run,
            holder=self._holder,
            devices=self._devices,
        )
        _write(self._residence, mine)

    def check_gone(self, earlier: Residence) -> None:
        """The process that wrote ``earlier`` is gone, or is this one.

        Raises:
            UnconfirmedError: it lives, or this process could not see it if it did.
        """
        if earlier.booted_since:
            return
        pid = earlier.pid
        if not earlier.seen_from_here:
            raise UnconfirmedError(
                f"An earlier trainer ran as process {pid} in another pid namespace{self._node}, as"
                f" {self._residence} there says, so nobody here can tell whether it is gone.",
                cure="A container that was started anew leaves such a file. Once `nvidia-smi` on"
                " the node itself shows nobody on the trainer's GPU, say so: `relax-infer resolve"
                f" {self._run} --who NAME --why TEXT --confirm-released`.",
            )
        if earlier.lives:
            raise UnconfirmedError(
                f"An earlier trainer process, {pid}{self._node}, is still alive and may hold the"
                " GPU.",
                cure=f"Ray believes it dead. See there what it is (`ps -o pid,stat,lstart,cmd -p"
                f" {pid}`; T: frozen, D: in the kernel) and end it (`kill -9 {pid}`); then it goes"
                " on by itself.",
            )

    def check_not_seen(self, earlier: Residence) -> None:
        """Before a person's word is taken for what cannot be looked at.

        Raises:
            PermanentError: it can be looked at, and the process that wrote ``earlier`` lives.
        """
        if earlier.seen_from_here and earlier.lives:
            raise PermanentError(
                f"An earlier trainer process, {earlier.pid}{self._node}, is alive on this host.",
                cure=f"End it there (`kill -9 {earlier.pid}`), then say so again.",
            )


def _read(path: Path, model: type[_M]) -> _M | None:
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None


def _write(path: Path, value: Message) -> None:
    """Whole or not at all, and on the disk when it returns."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    with partial.open("w") as file:
        file.write(value.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
