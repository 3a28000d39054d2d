"""EngineLifecycle: one engine group and the state of each of its replicas."""

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import (
    EngineOperation,
    GroupReport,
    GroupSnapshot,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LifecycleInput, RoleOperation, RoleResult
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.machines import (
    GROUP,
    REPLICA,
    GroupEvent,
    GroupState,
    ReplicaEvent,
    ReplicaState,
)
from workflows._calls import (
    OFFLOAD_ENGINES,
    ONLOAD_ENGINES,
    PROBE_ENGINES,
    STOP_ENGINES,
    Call,
)
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._mailbox import Mailbox
from workflows._visible import show_details, show_state

ATTEMPTS = 4


@workflow.defn(name="EngineLifecycle")
class EngineLifecycle:
    """Brings the replicas of one model up and down, and says what each of them is doing.

    Its role asks ``onload``, ``offload``, ``probe`` and ``stop`` (payload RoleOperation); every
    answer is a GroupAnswer: the outcome and the snapshot to publish.
    """

    @workflow.init
    def __init__(self, start: LifecycleInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._group = GroupState(carried.get("group", GROUP.initial))
        self._replicas: dict[int, ReplicaReport] = {
            report["replica"]: ReplicaReport.model_validate(report)
            for report in carried.get("replicas", [])
        }
        self._generations: list[int] = carried.get("generations", [0] * start.group.replicas)
        fence = carried.get("fence")
        self._fence = FenceToken.model_validate(fence) if fence else None
        self._mail = Mailbox(carried.get("answers"))
        self._busy = False
        self._stopped = False

    @workflow.run
    async def run(self, start: LifecycleInput) -> GroupSnapshot:
        self._show()
        await workflow.wait_condition(lambda: self._stopped or self._may_continue_as_new)
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self._stopped:
            return self._snapshot()
        workflow.continue_as_new(start.model_copy(update={"carried": self._carry()}))

    @property
    def _may_continue_as_new(self) -> bool:
        return not self._busy and workflow.info().is_continue_as_new_suggested()

    def _carry(self) -> dict[str, Any]:
        return {
            "group": self._group,
            "replicas": [r.model_dump(mode="json") for r in self._replicas.values()],
            "generations": self._generations,
            "fence": self._fence.model_dump(mode="json") if self._fence else None,
            "answers": self._mail.carry(),
        }

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        await self._mail.serve(ask, self._answer)

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.query
    def snapshot(self) -> GroupSnapshot:
        return self._snapshot()

    async def _answer(self, ask: Ask) -> RoleResult:
        operation = RoleOperation.model_validate(ask.payload)
        if operation.method == "probe":
            return await self._probe(operation)
        if operation.method == "resolve":
            return await self._resolve()
        await workflow.wait_condition(lambda: not self._busy)
        self._busy = True
        try:
            match operation.method:
                case "onload":
                    return await self._onload(operation, ask.operation_id)
                case "offload":
                    return await self._offload(operation, ask.operation_id)
                case "stop":
                    return await self._stop(operation, ask.operation_id)
        finally:
            self._busy = False
            await self._tell_role()

    # --- operations

    async def _onload(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Launch what was never launched, wake what sleeps; READY when every replica answers."""
        self._admit(operation)
        if self._group is GroupState.STOPPED:
            self._move(GroupEvent.LAUNCH_STARTED)
            for replica in range(self._start.group.replicas):
                self._set(self._fresh(replica))
        else:
            self._move(GroupEvent.ONLOAD_STARTED)
            self._each(ReplicaEvent.ONLOAD_STARTED)
        launching = self._group is GroupState.STARTING
        self._show()
        report = await self._call(ONLOAD_ENGINES, operation, operation_id, "onload")
        for fresh in report.replicas:
            self._settle_onload(fresh, launching)
        if launching:
            self._move(GroupEvent.LAUNCHED)
        self._need_all(ReplicaState.READY, "onload", report)
        self._move(GroupEvent.OPENED)
        return self._result(report)

    def _settle_onload(self, fresh: ReplicaReport, launching: bool) -> None:
        before = self._replicas[fresh.replica]
        up = fresh.state is ReplicaState.READY
        state = before.state
        if launching and (up or fresh.error is None):
            state = REPLICA.advance(state, ReplicaEvent.LAUNCHED)
        if up:
            state = REPLICA.advance(state, ReplicaEvent.OPENED)
        elif state is ReplicaState.STARTING:
            state = REPLICA.advance(state, ReplicaEvent.LAUNCH_FAILED)
        else:
            state = REPLICA.advance(state, ReplicaEvent.ONLOAD_FAILED)
        if up and (before.incarnation, before.base_url) != (fresh.incarnation, fresh.base_url):
            self._generations[fresh.replica] += 1
        self._set(fresh.model_copy(update={"state": state}))

    async def _offload(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Drain and release; SLEEPING when every replica gave evidence."""
        self._admit(operation)
        self._move(GroupEvent.DRAIN_STARTED)
        self._each(ReplicaEvent.DRAIN_STARTED)
        self._show()
        report = await self._call(OFFLOAD_ENGINES, operation, operation_id, "offload")
        for fresh in report.replicas:
            asleep = fresh.state is ReplicaState.SLEEPING
            event = ReplicaEvent.RELEASE_CONFIRMED if asleep else ReplicaEvent.DRAIN_FAILED
            self._advance(fresh, event)
        self._need_all(ReplicaState.SLEEPING, "offload", report)
        self._move(GroupEvent.RELEASE_CONFIRMED)
        return self._result(report)

    async def _stop(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """End every process, with proof; what was never launched is stopped as it is."""
        if self._group is not GroupState.STOPPED:
            self._move(GroupEvent.STOP_STARTED)
            self._each(ReplicaEvent.STOP_STARTED)
            self._show()
            report = await self._call(STOP_ENGINES, operation, operation_id, "stop")
            for fresh in report.replicas:
                gone = fresh.state is ReplicaState.DEAD
                event = ReplicaEvent.RELEASE_PROVED if gone else ReplicaEvent.STOP_UNCONFIRMED
                self._advance(fresh, event)
            self._need_all(ReplicaState.DEAD, "stop", report)
            self._move(GroupEvent.RELEASE_PROVED)
            result = self._result(report)
        else:
            result = RoleResult(state=self._group)
        self._stopped = True
        return result

    async def _probe(self, operation: RoleOperation) -> RoleResult:
        """What every replica's own answer proves under the asked token; changes a BLOCKED group."""
        report = await PROBE_ENGINES(self._start.group, summary="probe")
        proved = _proved(report, operation.fence)
        if self._group is GroupState.BLOCKED and not self._busy and proved is not None:
            self._move(proved)
            for fresh in report.replicas:
                self._set(fresh)
            await self._tell_role()
        elif self._group is GroupState.BLOCKED:
            proved = None
        state = "BLOCKED" if proved is None else GROUP.advance(GroupState.BLOCKED, proved)
        return self._result(report).model_copy(update={"state": state})

    async def _resolve(self) -> RoleResult:
        """A person said that what blocked the group is gone: the next grant launches it anew."""
        if self._group is GroupState.BLOCKED:
            self._move(GroupEvent.RESOLVED_BY_OPERATOR)
            self._replicas.clear()
            await self._tell_role()
        return RoleResult(state=self._group)

    # --- pieces

    async def _tell_role(self) -> None:
        """The role learns what the group has become before it hears how the operation ended."""
        self._show()
        role = f"{self._start.run.run}.{self._start.group.role}"
        await workflow.get_external_workflow_handle(role).signal("group_changed", self._snapshot())

    def _admit(self, operation: RoleOperation) -> None:
        """The workflow's own fence: an operation of an earlier grant is refused here already."""
        offered, seen = operation.fence, self._fence
        if offered is None:
            raise fail(PERMANENT, f"{operation.method} needs the fence token of a grant")
        if seen is not None and offered.counter < seen.counter:
            raise fail(PERMANENT, f"fence token {offered} is stale: {seen} has been seen")
        self._fence = offered

    async def _call(
        self,
        call: Call[EngineOperation, GroupReport],
        operation: RoleOperation,
        operation_id: str,
        doing: str,
    ) -> GroupReport:
        """Run a lifecycle activity. After a lost worker the same operation id is asked again: the
        engines' own actors join it or return its recorded result. Anything else unclear blocks."""
        request = EngineOperation(
            group=self._start.group,
            operation_id=operation_id,
            fence=operation.fence or self._fence or FenceToken(counter=0, grant_id="none"),
            weights=operation.weights,
        )
        summary = f"{self._start.group.role} {doing}"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await call(request, summary=summary)
            except ActivityError as error:
                if kind_of(error) == PERMANENT or attempt == ATTEMPTS:
                    self._move(GroupEvent.OPERATION_UNCONFIRMED)
                    raise fail(kind_of(error), f"{summary}: {text_of(error)}") from error
        raise AssertionError("unreachable")

    def _need_all(self, state: ReplicaState, doing: str, report: GroupReport) -> None:
        """Block the group unless every replica is in ``state``."""
        if all(r.state is state for r in self._replicas.values()):
            return
        self._move(GroupEvent.OPERATION_UNCONFIRMED)
        errors = "; ".join(report.errors()) or "no reason was given"
        raise fail(UNCONFIRMED, f"{self._start.group.role} {doing}: {errors}")

    def _fresh(self, replica: int) -> ReplicaReport:
        return ReplicaReport(
            replica=replica,
            engine_id=self._start.group.engine_id(replica),
            state=REPLICA.initial,
        )

    def _each(self, event: ReplicaEvent) -> None:
        for report in list(self._replicas.values()):
            self._advance(report, event)

    def _advance(self, fresh: ReplicaReport, event: ReplicaEvent) -> None:
        state = REPLICA.advance(self._replicas[fresh.replica].state, event)
        self._set(fresh.model_copy(update={"state": state}))

    def _set(self, report: ReplicaReport) -> None:
        self._replicas[report.replica] = report

    def _move(self, event: GroupEvent) -> None:
        self._group = GROUP.advance(self._group, event)

    def _result(self, report: GroupReport) -> RoleResult:
        versions = {r.weight_version for r in report.replicas}
        digests = {r.weights_digest for r in report.replicas}
        return RoleResult(
            evidence=(report.evidence,) if report.evidence else (),
            holders=tuple(r.engine_id for r in report.replicas),
            weight_version=versions.pop() if len(versions) == 1 else None,
            weights_digest=digests.pop() if len(digests) == 1 else None,
            state=self._group,
        )

    def _snapshot(self) -> GroupSnapshot:
        versions = {r.weight_version for r in self._replicas.values()}
        return GroupSnapshot(
            role=self._start.group.role,
            model=self._start.group.model,
            state=self._group,
            weight_source=self._start.group.weight_source,
            weight_version=versions.pop() if len(versions) == 1 else None,
            replicas=tuple(self._replicas[k] for k in sorted(self._replicas)),
            generations=tuple(self._generations),
        )

    def _show(self) -> None:
        show_state(self._group)
        rows = [(r.engine_id, f"{r.state} {r.error or ''}") for r in self._replicas.values()]
        doing = f"{self._start.group.role} {self._start.group.model} is **{self._group}**."
        if self._fence is not None:
            rows.append(("fence", str(self._fence)))
        show_details(doing, rows)


def _proved(report: GroupReport, fence: FenceToken | None) -> GroupEvent | None:
    """What the replicas' own answers prove under ``fence``; None: nothing."""
    states = {r.state for r in report.replicas}
    if states == {ReplicaState.DEAD}:
        return GroupEvent.RELEASE_PROVED
    if any(r.fence != fence for r in report.replicas):
        return None
    if states == {ReplicaState.SLEEPING}:
        return GroupEvent.SLEEP_PROVED
    return GroupEvent.READY_PROVED if states == {ReplicaState.READY} else None
