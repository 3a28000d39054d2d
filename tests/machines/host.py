"""One engine: the real ``EngineActor`` and ``EngineReplica`` against a pretended host.

Only the outside world is pretended: processes, memory and files. Every function is pure.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import relax_infer.engines.replica as replica_module
from relax_infer.contracts.engines import (
    EngineOperation,
)
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken, StaleFence
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.group import _told
from relax_infer.engines.replica import EngineReplica
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
        self.token = engine.seen.real() if engine.seen else None
        self.trouble = trouble
        processes = SimpleNamespace(incarnation="i", session=1, tree=())
        self._row = SimpleNamespace(
            processes=processes, base_url="u", socket="s", log="l", memory_before=None
        )
        self.process = SimpleNamespace(
            holder=self._row,
            control=self,
            exited=self.exited,
            exits_within=self.exits_within,
            tail=lambda: "",
        )

    # files
    def holder(self) -> Any:
        return self._row if self.kind else None

    def fence(self) -> FenceToken | None:
        return self.token

    def write_fence(self, token: FenceToken) -> None:
        self.token = token

    # process
    def exited(self) -> bool:
        return self.kind == "adopted" or self.gpu not in _ALIVE

    async def exits_within(self, seconds: float) -> bool:
        return self.exited()

    # control
    async def status(self) -> dict[str, Any]:
        self._need_alive()
        seen = self.memory.seen
        return {"fence": seen.model_dump() if seen else None, "ready": self.gate}

    async def open(self, token: FenceToken) -> None:
        self._admit(token)
        self.gate = True

    async def close(self, token: FenceToken) -> None:
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
    async def start(self, *_: object, token: FenceToken, **__: object) -> Any:
        if self.gpu is not Gpu.NONE:
            raise Violation(f"a second server is started while the first is {self.gpu}")
        if self.trouble == "launch":
            raise TransientError("it did not start; nothing of it is left")
        self.kind, self.gate, self.memory = "own", False, FenceMemory(token)
        if self.trouble == "load":
            self.gpu = Gpu.ORPHAN
            raise UnconfirmedError("it did not start and could not be proved gone")
        self.gpu = Gpu.FULL
        return self.process

    async def end(self, *_: object) -> None:
        self.gate = False
        if self.trouble == "prove":
            self.gpu = Gpu.ORPHAN if self.gpu in HOLDING else Gpu.NONE
            raise UnconfirmedError("a process may be left")
        self.gpu, self.kind, self.memory = Gpu.NONE, "", FenceMemory()

    async def drain(self, _: object, token: FenceToken, timeout: float) -> None:
        await self.close(token)
        if self.trouble == "drain":
            raise UnconfirmedError("requests did not end")


@contextmanager
def _on(host: _Host) -> Iterator[None]:
    with replaced(
        replica_module,
        start_engine=host.start,
        end_engine=host.end,
        drain=host.drain,
        close_before_end=nothing,
        confirm_drained=nothing,
        HolderFiles=lambda *_: host,
        EngineProcess=lambda *_: host.process,
    ):
        yield


def _actor(engine: Engine, host: _Host) -> EngineActor:
    replica: Any = object.__new__(EngineReplica)
    replica.spec, replica.replica, replica.files = SPEC, 0, host
    replica.engine = host.process if engine.holder else None
    replica.version = replica.digest = replica.error = replica._folder = None
    replica._resident, replica.state = set(engine.resident), engine.state
    replica._check_weights = nothing
    actor: Any = object.__new__(EngineActor)
    actor._replica, actor._turn = replica, asyncio.Lock()
    actor._fence = FenceMemory(engine.seen.real() if engine.seen else None)
    return actor


def _value(replica: Any, host: _Host) -> Engine:
    return Engine(
        state=replica.state,
        gpu=host.gpu,
        seen=token_of(host.token),
        server_seen=token_of(host.memory.seen) if host.gpu in _ALIVE else None,
        resident=tuple(sorted(replica._resident)),
        gate=host.gate,
        holder=host.kind,
    )


@memo
def operate(engine: Engine, kind: Any, token: Token, trouble: str) -> tuple[Engine, Report]:
    """The engine after the real actor carried out ``kind``, and what it reports.

    ``trouble`` is where the host fails: launch, load, drain, keep (memory) or prove;
    "" nowhere.
    """
    host = _Host(engine, trouble)
    actor: Any = _actor(engine, host)
    op = EngineOperation(group=SPEC, operation_id="op", fence=token.real())
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
def lose_actor(engine: Engine) -> Engine:
    """The actor died and is made again; the server lives on."""
    host = _Host(engine, "")
    with _on(host):
        replica = EngineReplica(SPEC, 0)
    host.kind = "adopted" if host.kind else ""
    return _value(replica, host)


def lose_server(engine: Engine, *, orphan: bool) -> Engine:
    """The server died; an orphan of it may still hold memory."""
    left = Gpu.ORPHAN if orphan and engine.gpu in HOLDING else Gpu.NONE
    return engine._replace(gpu=left, gate=False, server_seen=None)
