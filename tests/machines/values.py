"""What a search keeps and compares: tokens, engines, groups, and the memory of pure results.

A mutation of a rule must call :func:`forget`.
"""

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from relax_infer.contracts.engines import (
    BundleBinding,
    EngineGroupSpec,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.machines import GROUP, GroupState, ReplicaState

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
    OWED = "OWED"
    """No process of it is left; the driver has not freed its memory."""


HOLDING = frozenset({Gpu.PARTIAL, Gpu.FULL, Gpu.ORPHAN, Gpu.OWED})


class Engine(NamedTuple):
    """One replica: its actor's knowledge, its files, and the physical truth."""

    state: ReplicaState = ReplicaState.DEAD
    gpu: Gpu = Gpu.NONE
    seen: Token | None = None
    """Of the actor; kept in a file, so it outlives the actor."""
    ended: bool = False
    """Whether the grant of ``seen`` was released here; kept with it."""
    server_seen: Token | None = None
    resident: tuple[str, ...] = ()
    gate: bool = False
    holder: str = ""
    """The holder file: "" none, "own" of this actor, "adopted" of an earlier one."""
    error: bool = False
    """The actor remembers a failure."""
    closed: tuple[Token, ...] = ()
    """Grants that the store says are over for it; only those that it would not refuse anyhow."""

    def with_closed(self, token: Token) -> "Engine":
        """The store says so from now on; the engine itself has not heard."""
        if self.seen is not None and token < self.seen:
            return self
        return self._replace(closed=tuple(sorted({*self.closed, token})))


_WRONG = "it did not work"


class Report(NamedTuple):
    """What an activity learns about one replica."""

    state: ReplicaState
    fence: Token | None
    error: bool = False
    stale: bool = False
    silent: bool = False
    """Its host does not answer."""

    def real(self, replica: int) -> ReplicaReport:
        return ReplicaReport(
            replica=replica,
            engine_id=SPEC.engine_id(replica),
            state=self.state,
            fence=self.fence.real() if self.fence else None,
            error="Unconfirmed: no answer" if self.silent else _WRONG if self.error else None,
        )


Results = tuple[Any, ...]
"""What came back, in order: reports of an activity, :data:`LOST`, or what else was waited for."""
LOST = "lost"
"""An activity of which nobody knows what it did."""


class Recovery(NamedTuple):
    """One child ReplicaRecovery: what it was started with, and what it has met."""

    replica: int
    fence: Token
    rebuild: bool
    results: Results = ()


class Group(NamedTuple):
    """What an EngineLifecycle keeps."""

    state: GroupState = GROUP.initial
    records: tuple[tuple[int, ReplicaState], ...] = ()
    fence: Token | None = None
    ended: bool = False
    given_up: tuple[int, ...] = ()
    in_use: bool = False
    out_of_reach: tuple[int, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    """At work, in the order in which they began."""


class Call(NamedTuple):
    """An activity on engines, in flight."""

    kind: str
    token: Token
    replicas: tuple[int, ...]
    ends: bool
    """Whether the grant ends with it."""
    recovery: int = -1
    """Of which of the group's recoveries; -1: of the operation itself."""


class Answer(NamedTuple):
    """How an operation on a group ended, as its asker hears it."""

    ok: bool
    kind: str = ""
    """Of the failure."""
    state: str = ""


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
    bundles=(BundleBinding(bundle=0, node_id="n", node_ip="127.0.0.1", gpu_id=0),),
    device="cuda",
    store="memory://",
)


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits only for what it starts itself."""
    return _LOOP.run_until_complete(work)


def run_now(work: Coroutine[Any, Any, T]) -> T:
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


async def nothing(*_: object, **__: object) -> None:
    """In the place of what the model has no use for."""
