"""One ReplicaRecovery: the real workflow code, told what its activities brought, up to where it
waits.

A recovery is the list of what it has met so far (:class:`tests.machines.values.Recovery`), and is
run again from its start with it, as Temporal does. It launches once, not three times. Left out:
pauses, and the four times that one operation is asked for.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from temporalio.exceptions import ActivityError, ApplicationError

import workflows.replica_recovery as recovery_module
from relax_infer.contracts.engines import EngineOperation, GroupReport
from relax_infer.contracts.recovery import RecoveryInput, RecoveryNote, RecoveryResult
from relax_infer.contracts.refs import RunRef
from relax_infer.machines import RecoveryState
from tests.machines.values import (
    LOST,
    SPEC,
    Call,
    Recovery,
    Report,
    memo,
    nothing,
    replaced,
    run_now,
    token_of,
)
from workflows._failures import PERMANENT, UNCONFIRMED
from workflows.replica_recovery import ReplicaRecovery

AGAIN, WORD = "again", "word"
"""What a BLOCKED one may meet: time for another try, and a person's word."""
RUN = RunRef(run="run", store="memory://")


class Paused(BaseException):
    """Something is waited for that has not come yet."""

    def __init__(self, call: Call | None = None) -> None:
        self.call = call


class Course(NamedTuple):
    """How far a recovery has come."""

    states: tuple[RecoveryState, ...]
    """Entered, in order; its group has heard of each."""
    call: Call | None = None
    blocked: bool = False
    """It waits for time or a word."""
    result: RecoveryResult | None = None


def reported(replicas: tuple[int, ...], came: Any) -> GroupReport:
    """What an activity returns, or raises."""
    stale = came != LOST and came and all(report.stale for report in came)
    if came == LOST or stale:
        error = ActivityError(
            "it failed",
            scheduled_event_id=0,
            started_event_id=0,
            identity="",
            activity_type="",
            activity_id="",
            retry_state=None,
        )
        error.__cause__ = ApplicationError("it failed", type=PERMANENT if stale else UNCONFIRMED)
        raise error
    reports = (report.real(k) for k, report in zip(replicas, came, strict=True))
    return GroupReport(replicas=tuple(reports))


@memo
def course(recovery: Recovery) -> Course:
    """Up to what the recovery waits for now."""
    left, states = list(recovery.results), list[RecoveryState]()
    at_rest = False

    def calling(kind: str) -> Any:
        async def call(request: Any, *, summary: str) -> GroupReport:
            nonlocal at_rest
            at_rest = False
            while left and left[0] == WORD:
                child._word = left.pop(0)
            if left:
                return reported((recovery.replica,), left.pop(0))
            ends = isinstance(request, EngineOperation) and request.ends_grant
            token = getattr(request, "fence", None)
            asked = token_of(token) or recovery.fence
            raise Paused(Call(kind, asked, (recovery.replica,), ends))

        return call

    async def wait(condition: Any, **_: object) -> None:
        nonlocal at_rest
        if condition():
            return
        if not left:
            at_rest = True
            raise Paused
        if (met := left.pop(0)) == AGAIN:
            raise TimeoutError
        assert met == WORD
        child._word = met

    async def signal(name: str, note: RecoveryNote) -> None:
        states.append(note.state)

    start = RecoveryInput(
        run=RUN,
        group=SPEC.model_copy(update={"replicas": recovery.replica + 1}),
        replica=recovery.replica,
        fence=recovery.fence.real(),
        rebuild=recovery.rebuild,
        cause="it failed",
        restarts=1,
    )
    outside = SimpleNamespace(
        wait_condition=wait,
        sleep=nothing,
        info=lambda: SimpleNamespace(workflow_id="recovery"),
        get_external_workflow_handle=lambda _: SimpleNamespace(signal=signal),
    )
    child: Any = ReplicaRecovery(start)
    with replaced(
        recovery_module,
        workflow=outside,
        ASK_AGAIN=1,
        STOP_ENGINES=calling("stop"),
        PROBE_ENGINES=calling("probe"),
        LAUNCH_ENGINES=calling("launch"),
        LOAD_ENGINE_WEIGHTS=calling("load_weights"),
        ONLOAD_ENGINES=calling("onload"),
        show_state=lambda _: None,
        show_details=lambda *_: None,
    ):
        try:
            result = run_now(child.run(start))
        except Paused as paused:
            return Course(tuple(states), paused.call, at_rest)
    return Course(tuple(states), result=result)


def met(recovery: Recovery, what: tuple[Report, ...] | str) -> Recovery:
    """The recovery after one thing more; one that is BLOCKED again is as it was at first."""
    after = recovery._replace(results=(*recovery.results, what))
    return after._replace(results=(LOST,)) if course(after).blocked else after
