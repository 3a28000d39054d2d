"""The trainer as one engine: the real ``TrainerActor`` and ``PolicyTrainer``, without Megatron.

Only the device, the files and the other processes of the host are pretended. Of an
:class:`Engine`, ``server_seen`` is the token in the file of who is resident, ``holder`` says
whether an earlier actor wrote it, and ``resident`` is what the actor knows of the device.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import activities.training as activities_module
import relax_infer.training.trainer as trainer_module
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken, StaleFence
from relax_infer.contracts.refs import StagedRef
from relax_infer.engines import closed_grants
from relax_infer.machines import ReplicaState
from relax_infer.training._turns import Joined
from relax_infer.training.policy import PolicyTrainer
from relax_infer.training.trainer import TrainerActor
from tests.machines.values import (
    Answer,
    Engine,
    Gpu,
    Report,
    Token,
    memo,
    replaced,
    run,
    token_of,
)
from workflows._failures import PERMANENT, TRANSIENT, UNCONFIRMED

_STAGED = StagedRef(uri="memory://evidence", sha256="0" * 64, rows=1)


class _Device:
    """The device, the files of host and store, and whether an earlier process still lives."""

    def __init__(self, engine: Engine, trouble: str) -> None:
        self.gpu, self.trouble = engine.gpu, trouble
        self.kept = FenceMemory(engine.seen.real() if engine.seen else None, ended=engine.ended)
        self.resident_under = engine.server_seen.real() if engine.server_seen else None
        self.closed, self.tokens_closed = self, engine.closed

    # files
    def check(self, token: FenceToken) -> None:
        """Of ``ClosedGrants``."""
        if closed_grants.ends([closed_grants.name_of(t.real()) for t in self.tokens_closed], token):
            raise StaleFence(token, token)

    def write_fence(self, memory: FenceMemory) -> None:
        self.kept = FenceMemory(memory.seen, ended=memory.ended)

    def write_residence(self, token: FenceToken | None) -> None:
        self.resident_under = token

    def check_gone(self, _: object) -> None:
        if self.gpu is Gpu.ORPHAN:
            raise UnconfirmedError("an earlier process is still alive")

    def check_not_seen(self, _: object) -> None:
        if self.gpu is Gpu.ORPHAN:
            raise PermanentError("an earlier process is alive")

    # learner
    def to_device(self) -> None:
        if self.trouble == "launch":
            raise PermanentError("its checkpoint cannot be read")
        self.gpu = Gpu.PARTIAL
        if self.trouble == "load":
            raise TransientError("it failed in the middle")
        self.gpu = Gpu.FULL

    def to_host(self) -> None:
        if self.trouble == "drain":
            raise UnconfirmedError("an update did not end")
        self.gpu = Gpu.NONE


def _actor(engine: Engine, device: _Device) -> Any:
    policy: Any = object.__new__(PolicyTrainer)
    policy._learner, policy._device, policy._current = device, None, SimpleNamespace(step=0)
    policy.resident, policy.holds = "resident" in engine.resident, "holds" in engine.resident
    actor: Any = object.__new__(TrainerActor)
    actor._files, actor._policy, actor._holder = device, policy, "trainer/rank-0"
    actor._earlier = actor._bound = None
    if engine.holder:
        actor._earlier = SimpleNamespace(resident_under=device.resident_under)
    actor._fence = FenceMemory(device.kept.seen, ended=device.kept.ended)
    actor._turn, actor._in_thread = asyncio.Lock(), _inline
    actor._operations = Joined[Any]()
    return actor


async def _inline(call: Any, *args: Any) -> Any:
    return call(*args)


def _value(actor: Any, device: _Device) -> Engine:
    return Engine(
        gpu=device.gpu,
        seen=token_of(device.kept.seen),
        ended=device.kept.ended,
        server_seen=token_of(device.resident_under),
        resident=tuple(name for name in ("holds", "resident") if getattr(actor._policy, name)),
        holder="earlier" if actor._earlier is not None else "",
        closed=device.tokens_closed,
    )


def _with(engine: Engine, trouble: str, call: Any) -> tuple[Engine, Exception | None]:
    device = _Device(engine, trouble)
    actor = _actor(engine, device)
    with replaced(trainer_module, asyncio=SimpleNamespace(to_thread=_inline)):
        try:
            run(call(actor))
        except (PermanentError, TransientError, UnconfirmedError, StaleFence) as error:
            return _value(actor, device), error
    return _value(actor, device), None


@memo
def trainer_operate(
    engine: Engine, method: str, token: Token, trouble: str, *, ends: bool = True
) -> tuple[Engine, Report]:
    """The trainer after an onload or offload reached it."""
    op: Any = SimpleNamespace(fence=token.real())
    engine, error = _with(engine, trouble, lambda actor: getattr(actor, f"_{method}")(op))
    if error is not None:
        stale = isinstance(error, StaleFence | PermanentError)
        return engine, Report(ReplicaState.FAILED, engine.seen, error=True, stale=stale)
    resident = engine.gpu is Gpu.FULL
    return engine, Report(ReplicaState.READY if resident else ReplicaState.SLEEPING, engine.seen)


def trainer_answer(reports: tuple[Report, ...] | str) -> Answer:
    """What the lease hears: mirrors ``TrainerRole.perform``. A text: the activity was lost."""
    if isinstance(reports, str):
        return Answer(False, UNCONFIRMED)
    (report,) = reports
    if report.error:
        return Answer(False, PERMANENT if report.stale else TRANSIENT)
    return Answer(True, state=report.state)


@memo
def trainer_train(engine: Engine, token: Token) -> tuple[Engine, bool]:
    """The trainer after an update was asked for; whether it may train."""
    request: Any = SimpleNamespace(fence=token.real(), step=1)
    engine, error = _with(engine, "", lambda actor: actor._check_grant(request))
    return engine, error is None


@memo
def trainer_look(engine: Engine, token: Token) -> tuple[Engine, str]:
    """What the real ``probe_trainer`` makes of the real actor, and says; "": it failed."""
    return _asked(engine, token, activities_module.probe_trainer)


@memo
def trainer_forget(engine: Engine, token: Token) -> tuple[Engine, str]:
    """The same of ``forget_trainer``; "": the word is refused."""
    return _asked(engine, token, activities_module.forget_trainer)


def _asked(engine: Engine, token: Token, activity: Any) -> tuple[Engine, str]:
    trainer = SimpleNamespace(ranks=1, run=None)
    operation: Any = SimpleNamespace(trainer=trainer, operation_id="op", fence=token.real())
    said: list[str] = []

    async def ask(actor: Any) -> None:
        store = SimpleNamespace(write_json=lambda *_: _STAGED)
        with replaced(
            activities_module,
            TrainerGroup=lambda _: actor,
            store_of=lambda _: store,
            asyncio=SimpleNamespace(to_thread=_inline),
        ):
            said.append((await activity(operation)).state)

    engine, _ = _with(engine, "", ask)
    return engine, said[0] if said else ""


def lose_trainer(engine: Engine, *, orphan: bool) -> Engine:
    """Its process died and its actor is made again; the earlier process may still hold memory."""
    left = Gpu.ORPHAN if orphan and engine.gpu in (Gpu.FULL, Gpu.PARTIAL) else Gpu.NONE
    return engine._replace(gpu=left, resident=(), holder="earlier")


def end_trainer(engine: Engine) -> Engine:
    """A person ended every process of it."""
    return engine._replace(gpu=Gpu.NONE, resident=(), holder="earlier")
