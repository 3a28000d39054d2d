"""EngineLifecycle: one engine group, the state of each replica, and the mending of those lost."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import LifecycleInput, RoleOperation, RoleResult
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.recovery import RecoveryNote
from relax_infer.contracts.refs import StagedRef
from relax_infer.contracts.scale import MEMBER_METHODS, MemberAsk, Members, OutsiderRecord
from relax_infer.machines import GroupEvent, GroupState, ReplicaState
from workflows._calls import (
    LOAD_ENGINE_WEIGHTS,
    OFFLOAD_ENGINES,
    ONLOAD_ENGINES,
    PROBE_ENGINES,
    STOP_ENGINES,
)
from workflows._failures import PERMANENT, UNCONFIRMED, fail
from workflows._group_scaling import GroupScaling
from workflows._versions import AUTO_UPGRADE

LAST_PROOF = timedelta(minutes=1)
"""For a stop, to a recovery that waits for its proof; then a person is asked."""


@workflow.defn(name="EngineLifecycle", versioning_behavior=AUTO_UPGRADE)
class EngineLifecycle(GroupScaling):
    """Brings the replicas of one model up and down, watches them, and has lost ones rebuilt.

    Its role asks the methods of RoleOperation; every answer is a RoleResult, and the role hears
    ``group_changed`` before it.
    """

    @workflow.init
    def __init__(self, start: LifecycleInput) -> None:
        super().__init__(start)
        self._stopped = False

    @workflow.run
    async def run(self, start: LifecycleInput) -> GroupSnapshot:
        self._show()
        watch = asyncio.create_task(self._watch())
        while not self._stopped:
            await workflow.wait_condition(lambda: self._stopped or self._may_continue_as_new)
            await workflow.wait_condition(workflow.all_handlers_finished)
            if not self._stopped and self._may_continue_as_new:
                workflow.continue_as_new(start.model_copy(update={"carried": self._carry()}))
        watch.cancel()
        return self._book.snapshot()

    @property
    def _may_continue_as_new(self) -> bool:
        quiet = not self._turn.locked() and not self._recoveries
        return quiet and workflow.info().is_continue_as_new_suggested()

    # --- ways in

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        await self._mail.serve(ask, self._answer, self._with_news)

    def _with_news(self, answer: Answer) -> Answer:
        """Who asks again hears what the group is now."""
        news = self._next_snapshot().model_dump(mode="json")
        return answer.model_copy(update={"result": {**answer.result, "snapshot": news}})

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.signal
    async def recovery_changed(self, note: RecoveryNote) -> None:
        """A recovery entered a state; the replica's own state follows."""
        if self._recoveries.note(note):
            self._book.follow(note.replica, note.state)
            await self._tell_role()

    @workflow.query
    def outsiders(self) -> list[OutsiderRecord]:
        """Added replicas that the group does not operate on: in the making, leaving, left."""
        return list(self._book.outsiders.all)

    @workflow.query
    def snapshot(self) -> GroupSnapshot:
        return self._snapshot()

    async def _answer(self, ask: Ask) -> RoleResult | Members:
        if ask.method in MEMBER_METHODS:
            return await self._scale_step(MemberAsk.model_validate(ask.payload), ask.operation_id)
        operation = RoleOperation.model_validate(ask.payload)
        if operation.method == "probe":
            return await self._probe(operation)
        if operation.method == "stop":
            await self._wait_for_recoveries()
        elif operation.method in ("onload", "offload", "update"):
            await self._wait_for_leavers()
        async with self._at_work():
            match operation.method:
                case "onload":
                    return self._tell_with(await self._onload(operation, ask.operation_id))
                case "update":
                    return self._tell_with(await self._update(operation, ask.operation_id))
                case "offload":
                    return self._tell_with(await self._offload(operation, ask.operation_id))
                case "stop":
                    return await self._stop(operation, ask.operation_id)
                case "ready":
                    return await self._ready()
                case "recover":
                    return await self._recover_given_up()
                case "resolve":
                    if operation.word is not None:
                        await self._take_word_for_outsiders(operation.word)
                    return await self._resolve(operation)

    async def _wait_for_recoveries(self) -> None:
        """What is being rebuilt comes to its end; what waits for proof tries it once more."""
        await workflow.wait_condition(lambda: not self._recoveries.moving)
        if self._recoveries:
            await self._recoveries.look_again()
            with suppress(TimeoutError):
                await workflow.wait_condition(lambda: not self._recoveries, timeout=LAST_PROOF)

    # --- operations

    async def _onload(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Launch what is not there, wake what sleeps; a replica that fails is rebuilt at once.

        READY when no replica is in doubt and at least one answers. Otherwise those that came up
        are put to sleep again, so that the failure holds as little as can be.
        """
        self._admit(operation)
        book = self._book
        self._weights = operation.weights or self._weights
        launching = book.begin_onload()
        self._show()
        book.settle_onload(
            await self._call(ONLOAD_ENGINES, operation_id, "onload", book.usable, self._weights)
        )
        if launching:
            book.move(GroupEvent.LAUNCHED)
        await self._open("onload")
        book.in_use = True
        return self._result()

    async def _update(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Other weights into replicas that are up and keep their memory; one that fails is rebuilt
        at once. Raises as an onload does; the group then sleeps."""
        self._admit(operation)
        book = self._book
        if book.state is not GroupState.READY:
            raise fail(UNCONFIRMED, f"it is {book.state}: {self._told('update')}")
        self._weights = operation.weights or self._weights
        book.begin_update()
        self._show()
        asked = tuple(k for k, r in book.replicas.items() if r.state is ReplicaState.ONLOADING)
        book.settle_onload(
            await self._call(LOAD_ENGINE_WEIGHTS, operation_id, "update", asked, self._weights)
        )
        await self._open("update")
        return self._result()

    async def _open(self, doing: str) -> None:
        """READY when no replica is in doubt and one answers; replicas that failed are rebuilt."""
        book = self._book
        if book.failed:
            book.move(GroupEvent.OPERATION_UNCONFIRMED)
            await self._heal(book.failed, "it failed to load", rebuild=True)
            if book.failed or not book.ready:
                told = self._told(doing)
                await self._put_to_sleep()
                raise fail(UNCONFIRMED if book.failed else PERMANENT, told)
            book.move(GroupEvent.LOST_REPLICA_PROVED_GONE)
        book.move(GroupEvent.OPENED)

    async def _offload(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Drain and release; a replica that cannot is stopped, and its release proved."""
        self._admit(operation)
        self._book.in_use = False
        book = self._book
        book.move(GroupEvent.DRAIN_STARTED)
        book.begin_drain(book.holding)
        book.fence.end()
        self._show()
        asked = book.askable
        report = await self._call(OFFLOAD_ENGINES, operation_id, "offload", asked)
        book.settle_drain(report)
        evidence = (report.evidence,) if report.evidence else ()
        if not book.failed:
            book.move(GroupEvent.RELEASE_CONFIRMED)
        else:
            book.move(GroupEvent.OPERATION_UNCONFIRMED)
            evidence += await self._heal(book.failed, "it did not let go", rebuild=False)
            if book.failed:
                raise fail(UNCONFIRMED, self._told("offload"))
            book.move(GroupEvent.SLEEP_PROVED)
        return self._result(evidence, asked)

    async def _stop(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """End every process, with proof; what was never launched is stopped as it is."""
        book = self._book
        self._book.in_use = False
        if self._recoveries:
            raise fail(UNCONFIRMED, self._told("stop"))
        evidence: tuple[StagedRef, ...] = ()
        if book.state is not GroupState.STOPPED:
            if operation.fence is not None:
                self._admit(operation)
            book.begin_stop()
            self._show()
            if asked := book.askable:
                report = await self._call(STOP_ENGINES, operation_id, "stop", asked)
                book.settle_stop(report)
                evidence = (report.evidence,) if report.evidence else ()
            if book.failed:
                book.move(GroupEvent.OPERATION_UNCONFIRMED)
                evidence += await self._heal(book.failed, "it did not stop", rebuild=False)
                if book.failed:
                    raise fail(UNCONFIRMED, self._told("stop"))
            await self._end_added()
            book.move(GroupEvent.RELEASE_PROVED)
        self._stopped = True
        return self._result(evidence)

    async def _ready(self) -> RoleResult:
        """After a caller saw a failure: look at once, mend, and say how the group is now."""
        if self._book.state is GroupState.READY:
            report = await PROBE_ENGINES(self._book.spec, summary="look")
            up, ready = self._book.ready, ReplicaState.READY
            await self._mend([r for r in report.replicas if r.replica in up and r.state != ready])
        return self._result()

    async def _recover_given_up(self) -> RoleResult:
        """A person says that replicas that were given up are worth another try."""
        book = self._book
        again = tuple(book.given_up)
        book.give_another_chance(again)
        if again and book.state is GroupState.READY:
            book.move(GroupEvent.REPLICA_LOST)
            await self._settle()
        return self._result()
