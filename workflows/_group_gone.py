"""Engines whose workflow was ended by hand: what it would do with them is done in its place."""

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import RoleOperation, RoleResult
from relax_infer.machines import GroupState, ReplicaState
from workflows._calls import FORGET_ENGINES, STOP_ENGINES, Call
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._mailbox import Mailbox, NobodyThere


async def end_group(
    mail: Mailbox,
    group_id: str,
    spec: EngineGroupSpec,
    fence: FenceToken,
    word: str,
    operation_id: str,
    timeout: float,
) -> None:
    """A group of which the role is gone: what is left of it ends, and so does its workflow.

    Raises an ApplicationError where that is not proved and the word does not stand for it.
    """
    try:
        for method in ("resolve", "stop"):
            operation = RoleOperation.model_validate(
                {"method": method, "fence": fence, "word": word}
            )
            await mail.ask(
                group_id,
                method,
                operation,
                RoleResult,
                operation_id=f"{operation_id}@{spec.model}.{method}",
                timeout=timeout,
            )
    except NobodyThere:
        await end_engines(spec, fence, word)


async def end_engines(spec: EngineGroupSpec, fence: FenceToken, word: str | None) -> RoleResult:
    """Every process of the group's own replicas ends, by proof, or by a person's ``word`` where a
    host does not answer: its engine then loads nothing more under ``fence``, which the store says.

    Raises an ApplicationError: Permanent where a host shows a process in spite of the word.
    """
    ended = RoleResult(state=GroupState.STOPPED)
    left = _left(await _ask(STOP_ENGINES, spec, fence, spec.numbers))
    if left and word is not None:
        numbers = tuple(r.replica for r in left)
        left = _left(await _ask(FORGET_ENGINES, spec, fence, numbers, word))
        wrong = [r for r in left if not (r.error or "").startswith(UNCONFIRMED)]
        if wrong:
            raise fail(PERMANENT, _errors(wrong))
        return ended
    if left:
        raise fail(UNCONFIRMED, _errors(left))
    return ended


async def _ask(
    call: Call[EngineOperation, GroupReport],
    spec: EngineGroupSpec,
    fence: FenceToken,
    replicas: tuple[int, ...],
    word: str | None = None,
) -> GroupReport:
    request = EngineOperation(
        group=spec,
        operation_id=f"{workflow.uuid4()}",
        fence=fence,
        replicas=replicas,
        word=word,
    )
    doing = "end" if word is None else "forget"
    try:
        return await call(request, summary=f"{doing} {spec.role} {spec.model}, without workflow")
    except ActivityError as error:
        raise fail(kind_of(error), f"say it again: {text_of(error)}") from error


def _left(report: GroupReport) -> list[ReplicaReport]:
    return [r for r in report.replicas if r.state is not ReplicaState.DEAD]


def _errors(reports: list[ReplicaReport]) -> str:
    return "; ".join(f"{r.engine_id}: {r.error or f'it is {r.state}'}" for r in reports)
