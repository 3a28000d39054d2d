"""A group of engines: the real ``EngineLifecycle`` with pretended activities.

Every function is pure.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from temporalio.exceptions import ActivityError, ApplicationError

import workflows.engine_lifecycle as lifecycle_module
from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
)
from relax_infer.contracts.lease import LifecycleInput, RoleOperation
from relax_infer.contracts.refs import RunRef
from relax_infer.machines import IllegalTransition
from tests.machines.values import (
    SPEC,
    Answer,
    Group,
    Report,
    Token,
    memo,
    nothing,
    replaced,
    run,
    token_of,
)
from workflows._failures import PERMANENT, UNCONFIRMED, kind_of
from workflows.engine_lifecycle import EngineLifecycle


class _Paused(BaseException):
    """The lifecycle has started its activity."""


def _lifecycle(group: Group, replicas: int) -> Any:
    life: Any = object.__new__(EngineLifecycle)
    spec = SPEC.model_copy(update={"replicas": replicas})
    life._start = LifecycleInput(run=RunRef(run="run", store="memory://"), group=spec)
    life._group, life._fence = group.state, group.fence.real() if group.fence else None
    life._replicas = {k: Report(state, None).real(k) for k, state in group.records}
    life._generations, life._busy, life._stopped = [0] * replicas, False, False
    life._show, life._tell_role = lambda: None, nothing
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
