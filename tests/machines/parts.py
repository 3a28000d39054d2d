"""The project's own engine and group code, run on values that a search can keep and compare.

:class:`Engine` is one replica on its host: what its actor believes and what is physically there.
:func:`operate` runs the real ``EngineActor`` and ``EngineReplica`` against a pretended server;
:func:`begin`, :func:`finish`, :func:`probe` and :func:`resolve` run the real ``EngineLifecycle``.
Only the outside world is pretended: processes, memory, files and Temporal. Every function is pure,
so its results are remembered; a mutation must call :func:`forget`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from temporalio.exceptions import ActivityError, ApplicationError

import relax_infer.engines.replica as replica_module
import workflows.engine_lifecycle as lifecycle_module
from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
)
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken, StaleFence
from relax_infer.contracts.lease import LifecycleInput, RoleOperation
from relax_infer.contracts.refs import RunRef
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.group import _told
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import GROUP, GroupState, IllegalTransition, ReplicaState
from workflows._failures import PERMANENT, UNCONFIRMED, kind_of
from workflows.engine_lifecycle import EngineLifecycle

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_MEMOS: list[Any] = []


def memo(function: F) -> F:
    """Remember results until :func:`forget`."""
    remembered: Any = lru_cache(maxsize=None)(function)
    _MEMOS.append(remembered)
    return remembered


def forget() -> None:
    """Drop every remembered result; to be called when a rule was changed."""
    for remembered in _MEMOS:
        remembered.cache_clear()


class Violation(Exception):
    """A promise was broken; the text says which."""


class Token(NamedTuple):
    """A fence token as a value."""

    counter: int
    grant_id: str

    def real(self) -> FenceToken:
        return FenceToken(counter=self.counter, grant_id=self.grant_id)


def token_of(real: FenceToken | None) -> Token | None:
    return None if real is None else Token(real.counter, real.grant_id)


class Gpu(StrEnum):
    """What one engine physically has on the bundle, whatever anybody believes."""

    NONE = "-"
    """No process."""
    ASLEEP = "asleep"
    """A server without memory."""
    PARTIAL = "PARTIAL"
    """A server with a part of its memory."""
    FULL = "FULL"
    """A server with all of it."""
    ORPHAN = "ORPHAN"
    """The server is dead; something of it still holds memory."""


HOLDING = frozenset({Gpu.PARTIAL, Gpu.FULL, Gpu.ORPHAN})
_ALIVE = frozenset({Gpu.ASLEEP, Gpu.PARTIAL, Gpu.FULL})


class Engine(NamedTuple):
    """One replica: its actor's knowledge, its files, and the physical truth."""

    state: ReplicaState = ReplicaState.DEAD
    gpu: Gpu = Gpu.NONE
    seen: Token | None = None
    """Of the actor; kept in a file, so it outlives the actor."""
    server_seen: Token | None = None
    resident: tuple[str, ...] = ()
    gate: bool = False
    holder: str = ""
    """The holder file: "" none, "own" of this actor, "adopted" of an earlier one."""


class Report(NamedTuple):
    """What an activity learns about one replica."""

    state: ReplicaState
    fence: Token | None
    error: bool = False
    stale: bool = False

    def real(self, replica: int) -> ReplicaReport:
        return ReplicaReport(
            replica=replica,
            engine_id=SPEC.engine_id(replica),
            state=self.state,
            fence=self.fence.real() if self.fence else None,
            error="it did not work" if self.error else None,
        )


class Group(NamedTuple):
    """What an EngineLifecycle keeps."""

    state: GroupState = GROUP.initial
    records: tuple[tuple[int, ReplicaState], ...] = ()
    fence: Token | None = None


class Answer(NamedTuple):
    """How an operation on a group ended, as its asker hears it."""

    ok: bool
    kind: str = ""
    """Of the failure."""
    state: str = ""


class Called(NamedTuple):
    """A lifecycle activity was started; the group now waits for it."""

    group: Group
    token: Token


SPEC = EngineGroupSpec(
    run="run",
    role="rollout",
    model="m",
    model_path="m",
    weight_source="STATIC",
    replicas=1,
    gpus_per_replica=1,
    offload="memory_saver",
    ray_gpu_fraction=0.1,
    placement_group="pg",
    bundles=(),
    device="cpu",
    store="memory://",
)


class _Paused(BaseException):
    """The lifecycle has started its activity."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never really waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited for something that is not in the model")


@contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Names of a module, pretended for the duration."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# --- one engine


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


async def _nothing(*_: object, **__: object) -> None:
    return None


@contextmanager
def _on(host: _Host) -> Iterator[None]:
    with replaced(
        replica_module,
        start_engine=host.start,
        end_engine=host.end,
        drain=host.drain,
        close_before_end=_nothing,
        confirm_drained=_nothing,
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
    replica._check_weights = _nothing
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


# --- a group of engines


def _lifecycle(group: Group, replicas: int) -> Any:
    life: Any = object.__new__(EngineLifecycle)
    spec = SPEC.model_copy(update={"replicas": replicas})
    life._start = LifecycleInput(run=RunRef(run="run", store="memory://"), group=spec)
    life._group, life._fence = group.state, group.fence.real() if group.fence else None
    life._replicas = {k: Report(state, None).real(k) for k, state in group.records}
    life._generations, life._busy, life._stopped = [0] * replicas, False, False
    life._show, life._tell_role = lambda: None, _nothing
    return life


def _group(life: Any) -> Group:
    records = tuple((k, life._replicas[k].state) for k in sorted(life._replicas))
    return Group(life._group, records, token_of(life._fence))


@contextmanager
def _activities(call: Any) -> Iterator[None]:
    with replaced(
        lifecycle_module,
        ONLOAD_ENGINES=call,
        OFFLOAD_ENGINES=call,
        STOP_ENGINES=call,
        PROBE_ENGINES=call,
    ):
        yield


def _ask(life: Any, method: Any, token: Token | None) -> Answer:
    operation = RoleOperation(method=method, fence=token.real() if token else None)
    handler = getattr(life, f"_{method}")
    args = (operation,) if method == "probe" else (operation, "op")
    try:
        result = run(handler(*args))
    except (ApplicationError, IllegalTransition) as error:
        return Answer(False, kind_of(error))
    return Answer(True, state=result.state)


@memo
def begin(
    group: Group, replicas: int, method: str, token: Token | None
) -> tuple[Group, Token | None, Answer | None]:
    """The group once it has started its activity, with that one's token; or its answer at once."""
    life = _lifecycle(group, replicas)
    asked: list[Token | None] = []

    async def call(request: EngineOperation, *, summary: str) -> GroupReport:
        asked.append(token_of(request.fence))
        raise _Paused

    with _activities(call):
        try:
            answer = _ask(life, method, token)
        except _Paused:
            return _group(life), asked[0], None
    return _group(life), None, answer


@memo
def finish(
    before: Group, replicas: int, method: str, token: Token | None, reports: tuple[Report, ...]
) -> tuple[Group, Answer]:
    """The group after its activity came back, and its answer. No reports: the activity was lost.

    Runs the operation again from the group as it was ``before``: nothing changes a group while it
    is at work.
    """
    life = _lifecycle(before, replicas)

    async def call(request: EngineOperation, *, summary: str) -> GroupReport:
        if not reports or all(report.stale for report in reports):
            error = ActivityError(
                "it failed",
                scheduled_event_id=0,
                started_event_id=0,
                identity="",
                activity_type="",
                activity_id="",
                retry_state=None,
            )
            kind = PERMANENT if reports else UNCONFIRMED
            error.__cause__ = ApplicationError("it failed", type=kind)
            raise error
        return GroupReport(replicas=tuple(r.real(k) for k, r in enumerate(reports)))

    with _activities(call):
        answer = _ask(life, method, token)
    return _group(life), answer


@memo
def probe(
    group: Group, token: Token | None, reports: tuple[Report, ...], *, busy: bool
) -> tuple[Group, Answer]:
    """The group after a probe under ``token`` and what the probe proved."""
    life = _lifecycle(group, len(reports))
    life._busy = busy

    async def call(spec: EngineGroupSpec, *, summary: str) -> GroupReport:
        return GroupReport(replicas=tuple(r.real(k) for k, r in enumerate(reports)))

    with _activities(call):
        operation = RoleOperation(method="probe", fence=token.real() if token else None)
        result = run(life._probe(operation))
    return _group(life), Answer(True, state=result.state)


@memo
def resolve(group: Group, replicas: int) -> Group:
    """The group after a person said that what blocked it is gone."""
    life = _lifecycle(group, replicas)
    run(life._resolve())
    return _group(life)
