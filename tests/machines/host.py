"""One engine: the real ``EngineActor`` and ``EngineReplica`` against a pretended host.

Only the outside world is pretended: processes, memory and files. Every function is pure.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import relax_infer.engines.actor as actor_module
import relax_infer.engines.node as node_module
import relax_infer.engines.nodes as nodes_module
import relax_infer.engines.replica as replica_module
from relax_infer.contracts.engines import (
    EngineOperation,
)
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken, StaleFence
from relax_infer.engines import closed_grants
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.group import _told
from relax_infer.engines.holder import OwedMemory
from relax_infer.engines.node import EngineNode
from relax_infer.engines.nodes import ReplicaNodes
from relax_infer.engines.replica import EngineReplica
from relax_infer.engines.reports import ReplicaReports
from relax_infer.engines.resident import Resident
from relax_infer.machines import REPLICA, ReplicaEvent
from tests.machines.values import (
    HOLDING,
    SPEC,
    Engine,
    Gpu,
    Report,
    Token,
    Violation,
    memo,
    nothing,
    replaced,
    run,
    token_of,
)

_ALIVE = frozenset({Gpu.ASLEEP, Gpu.PARTIAL, Gpu.FULL})


class _Host:
    """The pretended server, its control socket and the files of its host."""

    def __init__(self, engine: Engine, trouble: str) -> None:
        self.gpu, self.gate, self.kind = engine.gpu, engine.gate, engine.holder
        self.memory = FenceMemory(engine.server_seen.real() if engine.server_seen else None)
        self.kept = FenceMemory(engine.seen.real() if engine.seen else None, ended=engine.ended)
        self.trouble, self.starting = trouble, False
        self.tokens_closed = engine.closed
        stamps = SimpleNamespace(incarnation="i", session=1, tree=())
        self._row: Any = SimpleNamespace(
            processes=stamps, base_url="u", socket="s", log="l", memory_before=None
        )
        self.process: Any = SimpleNamespace(
            holder=self._row,
            control=self,
            lost=self.lost,
            exited=self.exited,
            exits_within=self.exits_within,
        )

    # files
    def check(self, token: FenceToken) -> None:
        """Of ``ClosedGrants``."""
        if closed_grants.ends([closed_grants.name_of(t.real()) for t in self.tokens_closed], token):
            raise StaleFence(token, token)

    def holder(self) -> Any:
        return self._row if self.kind else None

    def remove_holder(self) -> None:
        self.kind = ""

    @property
    def owed_path(self) -> str:
        return "owed"

    def owed(self) -> OwedMemory | None:
        devices = tuple(each.device for each in SPEC.node_bundles(0, 0))
        return OwedMemory(devices=devices, before=0) if self.gpu is Gpu.OWED else None

    def remove_owed(self) -> None:
        if self.gpu is Gpu.OWED:
            self.gpu = Gpu.NONE

    async def memory_in_use(self, bundles: object) -> int:
        """What is owed comes back before anybody looks, unless that is the trouble."""
        return SPEC.residual_memory + 1 if self.trouble == "owe" else 0

    def fence(self) -> FenceToken | None:
        return self.kept.seen

    def fence_memory(self) -> FenceMemory:
        return FenceMemory(self.kept.seen, ended=self.kept.ended)

    def write_fence(self, memory: FenceMemory) -> None:
        self.kept = FenceMemory(memory.seen, ended=memory.ended)

    # process
    def found(self, *_: object) -> Any:
        """By an actor that did not start it."""
        self.kind = "adopted"
        return self.process

    def exited(self) -> bool:
        return self.kind == "adopted" or self.gpu not in _ALIVE

    def lost(self) -> str | None:
        return "it is not what it was" if self.exited() else None

    async def exits_within(self, seconds: float) -> bool:
        return self.exited()

    # control
    async def status(self) -> dict[str, Any]:
        self._need_alive()
        seen = self.memory.seen
        return {"fence": seen.model_dump() if seen else None, "ready": self.gate, "silent_for": 0.0}

    async def open(self, token: FenceToken) -> None:
        self._admit(token)
        self.gate = True

    async def close(self, token: FenceToken, drain_for: float = 0.0, timeout: float = 60.0) -> None:
        self._admit(token)
        self.gate = False

    async def continue_generation(self, token: FenceToken) -> None:
        self._admit(token)

    async def resume(self, tags: list[str], token: FenceToken, timeout: float) -> None:
        self._admit(token)
        self.gpu = Gpu.PARTIAL if tags == ["weights"] else Gpu.FULL
        if self.trouble == "load":
            raise UnconfirmedError("the load had no answer")

    async def release(self, tags: list[str], token: FenceToken, timeout: float) -> None:
        self._admit(token)
        self.gpu = Gpu.PARTIAL if self.trouble == "keep" else Gpu.ASLEEP

    def _admit(self, token: FenceToken) -> None:
        self._need_alive()
        try:
            self.memory.admit(token)
        except StaleFence as stale:
            raise PermanentError(str(stale)) from stale

    def _need_alive(self) -> None:
        if self.gpu not in _ALIVE:
            raise UnconfirmedError("no answer")

    # what the replica asks of its host
    async def start(self, launch: Any, *_: object) -> Any:
        if self.gpu is not Gpu.NONE:
            raise Violation(f"a second server is started while the first is {self.gpu}")
        if self.trouble == "launch":
            raise TransientError("it did not start; nothing of it is left")
        self.kind, self.gate, self.memory = "own", False, FenceMemory(launch.token)
        self.gpu, self.starting = Gpu.FULL, True
        return self.process

    async def answers(self, *_: object) -> None:
        if self.trouble == "load":
            raise TransientError("it did not answer in time")
        self.starting = False

    async def record_tree(self, *_: object) -> Any:
        return self.process

    async def end(self, *_: object) -> None:
        self.gate = False
        if self.trouble == "prove" or (self.starting and self.trouble == "load"):
            self.gpu = Gpu.ORPHAN if self.gpu in HOLDING else Gpu.NONE
            raise UnconfirmedError("a process may be left")
        owed = self.trouble == "owe" and self.gpu in HOLDING
        self.gpu, self.kind, self.memory = Gpu.OWED if owed else Gpu.NONE, "", FenceMemory()

    async def drain(self, _: object, token: FenceToken, timeout: float) -> None:
        await self.close(token)
        if self.trouble == "drain":
            raise UnconfirmedError("requests did not end")

    def find_processes(self, *_: object) -> tuple[Any, ...]:
        left = self.gpu not in (Gpu.NONE, Gpu.OWED)
        return (SimpleNamespace(stamp=SimpleNamespace(pid=7)),) if left else ()


async def _inline(call: Any, *args: Any) -> Any:
    return call(*args)


@contextmanager
def _on(host: _Host) -> Iterator[None]:
    with (
        replaced(
            replica_module,
            drain=host.drain,
            close_before_end=nothing,
            confirm_drained=nothing,
            _DYING_SECONDS=0.0,
            _GIVE_BACK_SECONDS=0.0,
        ),
        replaced(actor_module, asyncio=SimpleNamespace(to_thread=_inline, Lock=asyncio.Lock)),
        replaced(nodes_module, wait_for_answer=host.answers),
        replaced(
            node_module,
            start_server=host.start,
            record_tree=host.record_tree,
            end_engine=host.end,
            find_processes=host.find_processes,
            find_unrecorded_of=lambda *_: [],
            memory_in_use=host.memory_in_use,
            EngineProcess=host.found,
            HolderFiles=lambda *_, **__: host,
            asyncio=SimpleNamespace(to_thread=_inline),
        ),
    ):
        yield


def _replica(engine: Engine, host: _Host) -> Any:
    head: Any = object.__new__(EngineNode)
    head.spec, head.replica, head.node, head.files = SPEC, 0, 0, host
    head.process, head.unrecorded = host.process if engine.holder else None, ()
    replica: Any = object.__new__(EngineReplica)
    replica.spec, replica.replica, replica.files, replica.closed = SPEC, 0, host, host
    replica.head, replica.nodes = head, ReplicaNodes(head)
    replica.resident = _resident(engine, host)
    replica.error, replica._sender = "it failed" if engine.error else None, None
    replica.pulse = SimpleNamespace(begin=lambda: None, silence=_no_silence)
    replica.reports, replica.state = ReplicaReports(replica), engine.state
    return replica


def _resident(engine: Engine, host: _Host) -> Any:
    resident: Any = Resident("e", host)  # type: ignore[arg-type]
    resident.tags = set(engine.resident)
    resident.check_weights = resident.check_canary = nothing
    return resident


async def _no_silence(*_: object) -> float:
    return 0.0


def _actor(engine: Engine, host: _Host) -> EngineActor:
    actor: Any = object.__new__(EngineActor)
    actor._replica, actor._turn = _replica(engine, host), asyncio.Lock()
    actor._fence = host.fence_memory()
    return actor


def _value(replica: Any, host: _Host) -> Engine:
    return Engine(
        state=replica.state,
        gpu=host.gpu,
        seen=token_of(host.kept.seen),
        ended=host.kept.ended,
        server_seen=token_of(host.memory.seen) if host.gpu in _ALIVE else None,
        resident=tuple(sorted(replica.resident.tags)),
        gate=host.gate,
        holder=host.kind,
        error=replica.error is not None,
        closed=host.tokens_closed,
    )


@memo
def operate(
    engine: Engine, kind: Any, token: Token, trouble: str, *, ends: bool = True
) -> tuple[Engine, Report]:
    """The engine after the real actor carried out ``kind``, and what it reports.

    ``trouble`` is where the host fails: launch, load, drain, keep (memory), prove, or owe (no
    process is left and the driver has not freed its memory); "" nowhere.
    """
    host = _Host(engine, trouble)
    actor: Any = _actor(engine, host)
    op = EngineOperation(group=SPEC, operation_id="op", fence=token.real(), ends_grant=ends)
    with _on(host):
        outcome = run(actor._once(kind, op))
    told = _told(outcome)
    if "IllegalTransition" in (told.error or ""):
        raise Violation(f"IllegalTransition in a legal schedule: {told.error}")
    report = Report(
        told.state, token_of(told.fence), told.error is not None, outcome.stale is not None
    )
    return _value(actor._replica, host), report


@memo
def look(engine: Engine) -> Report:
    """What a probe of this engine reports."""
    host = _Host(engine, "")
    actor: Any = _actor(engine, host)
    with _on(host):
        told = run(actor.probe())
    return Report(told.state, token_of(told.fence), told.error is not None)


@memo
def health(engine: Engine) -> Report:
    """What a watcher of this engine is told."""
    host = _Host(engine, "")
    actor: Any = _actor(engine, host)
    with _on(host):
        told = run(actor.health())
    return Report(told.state, token_of(told.fence), told.error is not None)


@memo
def lose_actor(engine: Engine) -> Engine:
    """The actor died and is made again; the server lives on."""
    host = _Host(engine, "")
    with _on(host):
        replica = EngineReplica(SPEC, 0)
    assert replica.state in (REPLICA.advance(REPLICA.initial, ReplicaEvent.DEATH_NOTICED), "DEAD")
    return _value(replica, host)


def lose_server(engine: Engine, *, orphan: bool) -> Engine:
    """The server died; an orphan of it may still hold memory."""
    left = Gpu.ORPHAN if orphan and engine.gpu in HOLDING else Gpu.NONE
    return engine._replace(gpu=left, gate=False, server_seen=None)
