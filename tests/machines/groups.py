"""A group of engines: the real ``EngineLifecycle`` and ``GroupBook``, told what came back.

An operation is the list of what it has met so far (:class:`Work`), and is run again from its start
with it, as Temporal does. Every function is pure. Every group goes through continue-as-new, which
must change nothing.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

from temporalio.exceptions import FailureError

import workflows._group_core as core_module
import workflows._group_mending as mending_module
import workflows._group_proving as proving_module
import workflows.engine_lifecycle as lifecycle_module
from relax_infer.contracts.engines import EngineOperation, GroupReport
from relax_infer.contracts.lease import LifecycleInput, RoleOperation
from relax_infer.contracts.recovery import RecoveryInput, RecoveryResult
from relax_infer.machines import IllegalTransition, RecoveryState
from tests.machines.recoveries import RUN, WORD, Paused, course, met, reported
from tests.machines.values import (
    SPEC,
    Answer,
    Call,
    Group,
    Recovery,
    Report,
    Results,
    Token,
    Violation,
    memo,
    nothing,
    replaced,
    run_now,
    token_of,
)
from workflows._failures import kind_of
from workflows._group_book import GroupBook
from workflows.engine_lifecycle import EngineLifecycle


class Work(NamedTuple):
    """An operation on a group that is at work."""

    method: str
    """Of RoleOperation; "mend": replicas were lost; "hear": a recovery ended late."""
    asked: Token | None
    before: Group
    nth: int = 0
    """Tells it from an earlier one of the same asker under the same token."""
    results: Results = ()
    replica: int = -1


class Turn(NamedTuple):
    """How far an operation has come."""

    group: Group
    """While it is at work, its recoveries include those that it has ended."""
    call: Call | None = None
    answer: Answer | None = None
    """None: it is at work."""


class _Children:
    """In the place of ``Recoveries``: the same questions, answered from :func:`course`.

    Left out: signals to children; a BLOCKED one tries again whenever the search has it do so.
    """

    def __init__(self, book: GroupBook, known: tuple[Recovery, ...], before: int) -> None:
        self.book, self.known = book, list(known)
        self.at_work = {recovery.replica: n for n, recovery in enumerate(known[:before])}
        self._mine: dict[int, Iterator[int]] = {}
        for replica in range(book.spec.replicas):
            numbers = [n for n, r in enumerate(known) if n >= before and r.replica == replica]
            self._mine[replica] = iter(numbers)

    def __contains__(self, replica: int) -> bool:
        return replica in self.at_work

    def __bool__(self) -> bool:
        return bool(self.at_work)

    async def begin(self, start: RecoveryInput) -> None:
        token = token_of(start.fence)
        assert token is not None
        n = next(self._mine[start.replica], len(self.known))
        if n == len(self.known):
            self.known.append(Recovery(start.replica, token, start.rebuild))
        self.at_work[start.replica] = n

    async def end_or_block(self, replica: int, _: object) -> RecoveryResult | None:
        state = course(self.known[self.at_work[replica]])
        for entered in state.states:
            self.book.follow(replica, entered)
        if RecoveryState.BLOCKED in state.states:
            return None  # also if it went on since
        return await self.take(replica)

    async def take(self, replica: int) -> RecoveryResult:
        result = course(self.known[self.at_work[replica]]).result
        if result is None:
            raise Paused
        del self.at_work[replica]
        return result

    async def resolve(self, replica: int, word: str) -> RecoveryResult:
        n = self.at_work[replica]
        if course(self.known[n]).result is None and WORD not in self.known[n].results:
            self.known[n] = met(self.known[n], WORD)
        return await self.take(replica)

    look_again = nothing

    def blocked(self, failed: Iterable[int]) -> str | None:
        """No recovery of the model is ended by hand."""
        del failed
        waits = any(course(self.known[n]).result is None for n in self.at_work.values())
        return "it waits for proof" if waits else None


async def _gather(*works: Any) -> list[Any]:
    """Each as far as it comes."""
    results, paused = list[Any](), None
    for work in works:
        try:
            results.append(await work)
        except Paused as waits:
            paused = waits
    if paused is not None:
        raise paused
    return results


_MODULES = (core_module, mending_module, proving_module, lifecycle_module)
"""Where the parts of EngineLifecycle are."""
_OUTSIDE: dict[str, Any] = {
    "asyncio": SimpleNamespace(gather=_gather),
    "workflow": SimpleNamespace(uuid4=lambda: "u", logger=logging.getLogger("model")),
    "ASK_AGAIN": 1,
}


def _lifecycle(group: Group, replicas: int, now: tuple[Recovery, ...], *, locked: bool) -> Any:
    life: Any = object.__new__(EngineLifecycle)
    spec = SPEC.model_copy(update={"replicas": replicas})
    life._start = LifecycleInput(run=RUN, group=spec)
    life._id, life._weights = "group", None
    life._book = GroupBook.restore(
        spec,
        {
            "state": group.state,
            "replicas": [Report(s, None).real(k).model_dump() for k, s in group.records],
            "generations": [0] * replicas,
            "given_up": [[k, "it was given up"] for k in group.given_up],
            "out_of_reach": group.out_of_reach,
            "fence": group.fence._asdict() if group.fence else None,
            "fence_ended": group.ended,
        },
    )
    life._book.in_use = group.in_use
    life._recoveries = _Children(life._book, now, len(group.recoveries))
    life._turn, life._stopped = asyncio.Lock(), False
    if locked:
        life._turn = SimpleNamespace(locked=lambda: True)
    life._show, life._tell_role = lambda: None, nothing
    return life


def _group(life: Any, *, over: bool) -> Group:
    book, children = life._book, life._recoveries
    _survives_continue_as_new(book)
    known = children.known
    return Group(
        book.state,
        tuple((k, book.replicas[k].state) for k in sorted(book.replicas)),
        token_of(book.fence.seen),
        book.fence.ended,
        tuple(sorted(book.given_up)),
        book.in_use,
        tuple(sorted(book.out_of_reach)),
        tuple(known[n] for n in sorted(children.at_work.values())) if over else tuple(known),
    )


def _survives_continue_as_new(book: GroupBook) -> None:
    carried = book.carry()
    again = GroupBook.restore(book.spec, json.loads(json.dumps(carried)))
    same = again.fence.ended == book.fence.ended and again.usable == book.usable
    if again.carry() != carried or again.snapshot() != book.snapshot() or not same:
        raise Violation("continue-as-new changed a group")


def _handler(life: Any, work: Work) -> Any:
    if work.method == "mend":
        ready = life._book.ready
        return life._mend([r.real(k) for k, r in zip(ready, work.results[0], strict=True) if r])
    if work.method == "hear":
        return life._hear_late(work.replica)
    if work.method == "ready":
        return life._ready()
    operation = RoleOperation.model_validate(
        {
            "method": work.method,
            "fence": work.asked.real() if work.asked else None,
            "word": "a person" if work.method == "resolve" else None,
        }
    )
    handler = getattr(life, f"_{work.method}")
    return handler(operation) if work.method in ("probe", "resolve") else handler(operation, "op")


@memo
def advance(work: Work, replicas: int, now: tuple[Recovery, ...], *, locked: bool = False) -> Turn:
    """Up to what the operation waits for, with the recoveries as they are ``now``.

    ``locked``: another one has the turn.
    """
    life = _lifecycle(work.before, replicas, now, locked=locked)
    left = list(work.results[work.method == "mend" :])

    def calling(kind: str) -> Any:
        async def call(request: Any, *, summary: str) -> GroupReport:
            if not isinstance(request, EngineOperation):
                return reported(tuple(range(replicas)), left.pop(0))
            token = token_of(request.fence)
            assert token is not None
            if left:
                return reported(request.targets, left.pop(0))
            raise Paused(Call(kind, token, request.targets, request.ends_grant))

        return call

    outside = {
        **_OUTSIDE,
        "ONLOAD_ENGINES": calling("onload"),
        "OFFLOAD_ENGINES": calling("offload"),
        "STOP_ENGINES": calling("stop"),
        "FORGET_ENGINES": calling("forget"),
        "PROBE_ENGINES": calling("probe"),
    }
    with ExitStack() as stack:
        for module in _MODULES:
            mine = {name: value for name, value in outside.items() if hasattr(module, name)}
            stack.enter_context(replaced(module, **mine))
        try:
            result = run_now(_handler(life, work))
        except Paused as paused:
            return Turn(_group(life, over=False), paused.call)
        except (FailureError, IllegalTransition, ValueError) as error:
            return Turn(_group(life, over=True), answer=Answer(False, kind_of(error)))
    state = result.state if result is not None else ""
    return Turn(_group(life, over=True), answer=Answer(True, state=state))
