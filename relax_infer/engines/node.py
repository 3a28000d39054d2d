"""One node's server of a replica, on its own host: its files, its process, its proof.

The head's actor has one for itself, every follower's actor another; they differ in their number.
Not for two callers at once, but for :meth:`EngineNode.report`.
"""

import asyncio
import os
from collections.abc import Iterable

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import RunRef
from relax_infer.engines.holder import HolderFiles, OwedMemory
from relax_infer.engines.memory import NodeUse, memory_in_use
from relax_infer.engines.orphans import Unrecorded, find_unrecorded_of, need_nobody_beside
from relax_infer.engines.place import check_place
from relax_infer.engines.process import (
    EngineProcess,
    Launch,
    end_engine,
    record_tree,
    start_server,
)
from relax_infer.engines.release import find_processes


class NodeReport(Message):
    """One node of a replica as its own host shows it."""

    node: int
    """0: the head."""
    actor_pid: int
    incarnation: str | None = None
    """Marker of its processes; None: nothing of the replica is on this host."""
    session: int | None = None
    pids: tuple[int, ...] = ()
    """Process tree of the server as it was when it became ready."""
    log: str | None = None
    lost: str | None = None
    """What is wrong with its server; None where it runs, or where there is none."""
    fence: FenceToken | None = None
    """Highest token that the node has seen."""
    owes: bool = False
    """Whether its last server is gone and nobody has seen its memory back."""


class EngineNode:
    """State and operations of one server of a replica."""

    def __init__(self, spec: EngineGroupSpec, replica: int, node: int, pool: str = "") -> None:
        self.spec, self.replica, self.node = spec, replica, node
        self.files = HolderFiles(spec, replica, pool, node=node)
        self.process: EngineProcess | None = None
        self.unrecorded: tuple[Unrecorded, ...] = ()
        """What lived of the replica on this host without a file when it was last looked for."""
        self._find()

    @property
    def name(self) -> str:
        """For people."""
        whole = self.spec.engine_id(self.replica)
        return f"{whole} on its node {self.node}" if self.node else whole

    @property
    def holds(self) -> bool:
        """Whether something of it may be on this host."""
        return self.process is not None or bool(self.unrecorded)

    @property
    def owes(self) -> bool:
        """Whether the last server is gone and nobody has seen its memory back."""
        return self.process is None and self._owed() is not None

    def left(self) -> str | None:
        """What is wrong with what it holds; None where nothing is."""
        if self.process is not None:
            return self.process.lost()
        return self._no_file() if self.unrecorded else None

    def check_place(self, *, loads: bool = False) -> None:
        """This process is where the node's GPUs were bound; raises as
        :func:`relax_infer.engines.place.check_place` does."""
        bound = self.spec.node_bundles(self.replica, self.node)
        if bound:
            check_place(self.name, bound[0], loads=loads)

    async def start(self, launch: Launch) -> None:
        """Start its server; it does not answer yet.

        Raises:
            UnconfirmedError: another incarnation, also one whose file was removed, or an engine or
                a trainer of another run may hold the GPUs still.
            TransientError: the last incarnation is gone and its memory did not come back.
        """
        if self.process is not None:
            raise UnconfirmedError(
                f"{self.name} holds incarnation {self.process.holder.processes.incarnation}.",
                cure="End it with proof before another is started.",
            )
        self.spec = launch.group
        run = RunRef(run=self.spec.run, store=self.spec.store)
        bundles = self.spec.node_bundles(self.replica, self.node)
        await asyncio.to_thread(need_nobody_beside, run, self.name, bundles)
        await self._need_recorded()
        await self._need_room()
        try:
            self.process = await start_server(launch, self.replica, self.node, self.files)
        except BaseException:
            self._find()  # it was written down before it could fail
            raise

    async def confirm(self) -> None:
        """Every process of its server lives and shows the marker, and is written down.

        Raises:
            PermanentError: the server is gone.
            UnconfirmedError: a later proof could miss one of its processes.
        """
        if self.process is None:
            raise PermanentError(f"{self.name} has no server to confirm.")
        if lost := self.process.lost():
            raise PermanentError(f"{self.name}: {lost}")
        self.process = await record_tree(self.process, self.files)

    async def end(self) -> NodeUse:
        """End every process of it and prove it; nothing where nothing is left. What no file is
        about is ended by a person. That its memory is back is told, not waited for.

        Raises:
            UnconfirmedError: it could not be proved; what is known of it stays.
        """
        use = await self.memory()
        if self.process is None:
            await self._need_recorded()
            return use
        if use.at_launch is not None:
            # Whoever is asked for the next launch may be another actor, which finds no holder.
            owed = OwedMemory(devices=self._devices, before=use.at_launch)
            self.files.write_owed(owed)
        await end_engine(self.process, self.spec, self.files)
        self.process = None
        await self._need_recorded()
        now = await self.memory()
        return use.model_copy(update={"after": now.in_use, "owing": now.owing})

    async def forget(self) -> None:
        """Take a person's word that nothing of it is left.

        Raises:
            PermanentError: this host still shows a process of it.
        """
        await asyncio.to_thread(self._look)
        living = self._unrecorded_pids()
        if self.process is not None:
            found = await asyncio.to_thread(find_processes, self.process.holder.processes)
            living |= {row.stamp.pid for row in found}
        if living:
            raise PermanentError(
                f"Engine {self.name} is not gone: processes {_listed(living)} of it live on this"
                " host.",
                cure="End them, then resolve again.",
            )
        self.files.remove_holder()
        self.files.remove_owed()
        self.process = None

    async def memory(self) -> NodeUse:
        """Of its own devices, as they are now. What its last server owes is forgotten once it is
        seen to be back."""
        bundles = self.spec.node_bundles(self.replica, self.node)
        use = NodeUse(
            node=self.node,
            devices=len(bundles),
            at_launch=self.process.holder.memory_before if self.process else None,
            in_use=await memory_in_use(bundles) if self.spec.device == "cuda" else None,
        )
        if self.process is not None or (owed := self._owed()) is None:
            return use
        if use.in_use is not None and use.in_use <= self._allowed(owed):
            self.files.remove_owed()
            return use
        told = self._owing(owed, use.in_use)
        return use.model_copy(update={"at_launch": owed.before, "owing": told})

    async def _need_recorded(self) -> None:
        """That no file is there says nothing where something of the replica lives all the same: a
        cleaner of temporary files has proved nothing."""
        await asyncio.to_thread(self._look)
        if self.unrecorded:
            pids = " ".join(map(str, sorted(self._unrecorded_pids())))
            raise UnconfirmedError(
                f"{self.name}: {self._no_file()}.",
                cure="A cleaner of temporary files may have removed it. End them on that node"
                f" (`kill -9 {pids}`); then it goes on by itself.",
            )

    def _look(self) -> None:
        self.unrecorded = tuple(find_unrecorded_of(self.spec, self.replica))

    def _unrecorded_pids(self) -> set[int]:
        return {pid for each in self.unrecorded for pid in each.pids}

    def _no_file(self) -> str:
        bundles = self.spec.node_bundles(self.replica, self.node)
        where = f"node {bundles[0].node_ip}" if bundles else "this host"
        marks = ", ".join(each.incarnation for each in self.unrecorded)
        return (
            f"processes {_listed(self._unrecorded_pids())} on {where} carry the mark of its"
            f" incarnation {marks} and have no file there any more"
        )

    async def _need_room(self) -> None:
        """That every process of an incarnation is gone does not say that its memory is free."""
        if self.owes and (owing := (await self.memory()).owing) is not None:
            raise TransientError(f"{self.name} is not started: {owing}")

    def _owed(self) -> OwedMemory | None:
        """Of the devices that it has now."""
        owed = self.files.owed()
        return owed if owed is not None and owed.devices == self._devices else None

    def _owing(self, owed: OwedMemory, in_use: int | None) -> str:
        bundles = self.spec.node_bundles(self.replica, self.node)
        where = f"GPU {', '.join(owed.devices)} of node {bundles[0].node_ip}"
        path = self.files.owed_path
        if in_use is None:
            return (
                f"its last server is gone, and nvidia-smi, which told what was in use on {where}"
                f" before it was started, is not on PATH there any more. Put it back; if you have"
                f" seen that its memory is free, remove {path} there."
            )
        return (
            f"its last server is gone and {where} still has {in_use} bytes in use,"
            f" {self._allowed(owed)} allowed. Look there with `nvidia-smi` for who holds them, and"
            f" end it; if that is meant to be there, remove {path} there."
        )

    def _allowed(self, owed: OwedMemory) -> int:
        return owed.before + self.spec.residual_memory * len(owed.devices)

    @property
    def _devices(self) -> tuple[str, ...]:
        return tuple(each.device for each in self.spec.node_bundles(self.replica, self.node))

    def report(self) -> NodeReport:
        process, fence = self.process, self.files.fence()
        if process is None:
            left = self.unrecorded
            return NodeReport(
                node=self.node,
                actor_pid=os.getpid(),
                incarnation=left[0].incarnation if left else None,
                pids=tuple(sorted(self._unrecorded_pids())),
                lost=self.left(),
                fence=fence,
                owes=self.owes,
            )
        return NodeReport(
            node=self.node,
            actor_pid=os.getpid(),
            incarnation=process.holder.processes.incarnation,
            session=process.holder.processes.session,
            pids=tuple(stamp.pid for stamp in process.holder.processes.tree),
            log=process.holder.log,
            lost=process.lost(),
            fence=fence,
        )

    def _find(self) -> None:
        """What the files say of a server that this object did not start to the end."""
        left = self.files.holder()
        self.process = None if left is None else EngineProcess(left, None)
        if left is None:
            self._look()


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
