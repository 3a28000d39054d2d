"""EngineLifecycle: one engine group, the state of each replica, and the mending of those lost."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

from relax_infer.contracts.engines import (
    EngineOperation,
    GroupReport,
    GroupSnapshot,
    ReplicaReport,
    WatchRequest,
)
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.lease import LifecycleInput, RoleOperation, RoleResult
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.recovery import RecoveryInput, RecoveryNote, RecoveryResult
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.machines import GroupEvent, GroupState, RecoveryState, ReplicaState
from workflows._calls import (
    FORGET_ENGINES,
    OFFLOAD_ENGINES,
    ONLOAD_ENGINES,
    PROBE_ENGINES,
    STOP_ENGINES,
    WATCH_ENGINES,
    Call,
)
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._group_book import GroupBook, has_let_go
from workflows._mailbox import Mailbox
from workflows._recoveries import Recoveries
from workflows._visible import show_details, show_state

WATCH_PAUSE = 10.0
"""Seconds before a watch that could not be kept is begun again."""
ASK_AGAIN = 4
"""Times that one operation id is asked for, after a worker or a reply was lost."""

LAST_PROOF = timedelta(minutes=1)
"""For a stop, to a recovery that waits for its proof; then a person is asked."""


@workflow.defn(name="EngineLifecycle")
class EngineLifecycle:
    """Brings the replicas of one model up and down, watches them, and has lost ones rebuilt.

    Its role asks the methods of RoleOperation; every answer is a RoleResult, and the role hears
    ``group_changed`` before it.
    """

    @workflow.init
    def __init__(self, start: LifecycleInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._id = f"{start.run.run}.{start.group.role}.{start.group.model}"
        book = carried.get("book")
        self._book = GroupBook.restore(start.group, book) if book else GroupBook(start.group)
        self._mail = Mailbox(carried.get("answers"))
        weights = carried.get("weights")
        self._weights = WeightsRef.model_validate(weights) if weights else None
        self._in_use = bool(carried.get("in_use", False))
        """Whether the role has confirmed an onload and nobody asked it to let go since."""
        self._recoveries = Recoveries(start.group, int(carried.get("recoveries", 0)))
        self._turn = asyncio.Lock()
        """One operation at a time; a loss that is noticed is one."""
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

    def _carry(self) -> dict[str, Any]:
        return {
            "book": self._book.carry(),
            "answers": self._mail.carry(),
            "weights": self._weights.model_dump(mode="json") if self._weights else None,
            "in_use": self._in_use,
            "recoveries": self._recoveries.made,
        }

    # --- ways in

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        await self._mail.serve(ask, self._answer)

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
    def snapshot(self) -> GroupSnapshot:
        return self._snapshot()

    async def _answer(self, ask: Ask) -> RoleResult:
        operation = RoleOperation.model_validate(ask.payload)
        if operation.method == "probe":
            return await self._probe(operation)
        if operation.method == "stop":
            await self._wait_for_recoveries()
        async with self._at_work():
            match operation.method:
                case "onload":
                    return await self._onload(operation, ask.operation_id)
                case "offload":
                    return await self._offload(operation, ask.operation_id)
                case "stop":
                    return await self._stop(operation, ask.operation_id)
                case "ready":
                    return await self._ready()
                case "recover":
                    return await self._recover_given_up()
                case "resolve":
                    return await self._resolve(operation)

    async def _wait_for_recoveries(self) -> None:
        """What is being rebuilt comes to its end; what waits for proof tries it once more."""
        await workflow.wait_condition(lambda: not self._recoveries.moving)
        if self._recoveries:
            await self._recoveries.look_again()
            with suppress(TimeoutError):
                await workflow.wait_condition(lambda: not self._recoveries, timeout=LAST_PROOF)

    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None, None]:
        """The group's turn; the role hears what the group has become before any answer."""
        async with self._turn:
            try:
                yield
            finally:
                await self._tell_role()

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
        if book.failed:
            book.move(GroupEvent.OPERATION_UNCONFIRMED)
            await self._heal(book.failed, "it failed to load", rebuild=True)
            if book.failed or not book.ready:
                told = self._told("onload")
                await self._put_to_sleep()
                raise fail(UNCONFIRMED if book.failed else PERMANENT, told)
            book.move(GroupEvent.LOST_REPLICA_PROVED_GONE)
        book.move(GroupEvent.OPENED)
        self._in_use = True
        return self._result()

    async def _offload(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Drain and release; a replica that cannot is stopped, and its release proved."""
        self._admit(operation)
        self._in_use = False
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
        self._in_use = False
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
            book.move(GroupEvent.RELEASE_PROVED)
        self._stopped = True
        return self._result(evidence)

    async def _ready(self) -> RoleResult:
        """After a caller saw a failure: look at once, mend, and say how the group is now."""
        if self._book.state is GroupState.READY:
            report = await PROBE_ENGINES(self._start.group, summary="look")
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

    async def _probe(self, operation: RoleOperation) -> RoleResult:
        """What every replica's own answer proves under the asked token. What is up stays so; a
        replica that failed is stopped with proof, and what sleeps says so with evidence."""
        await self._recoveries.look_again()
        report = await PROBE_ENGINES(self._start.group, summary="probe")
        seen = self._book.telling(report)
        proved = _proved(seen, operation.fence)
        if self._turn.locked():
            return self._doubted()  # an operation is on its way: what is seen may be before it
        if self._book.state is GroupState.READY:
            ready = proved is GroupEvent.READY_PROVED
            return self._result() if ready else self._doubted()
        async with self._at_work():
            if self._book.state is GroupState.BLOCKED:
                if proved is GroupEvent.READY_PROVED and not self._recoveries:
                    self._book.prove(proved, seen)
                    self._in_use = True
                elif proved is None or self._recoveries:
                    for each in seen:
                        if each.state is ReplicaState.FAILED:
                            self._book.lose(each)
                    await self._heal(self._book.failed, "a probe found it failed", rebuild=False)
                    await self._settle()
                else:
                    return await self._prove_sleep(operation)
            if self._book.holds_nothing:
                return await self._prove_sleep(operation)
        return self._result()

    async def _prove_sleep(
        self, operation: RoleOperation, left: list[ReplicaReport] | None = None
    ) -> RoleResult:
        """A group that seems to hold nothing lets go once more, so that there is evidence, and that
        nothing is loaded under the asked token again. BLOCKED where an engine does not say so;
        ``left`` gets what such engines said."""
        book = self._book
        if operation.fence is not None:
            self._admit(operation)
        book.fence.end()
        self._in_use = False
        if not (asked := book.askable):
            return self._result((), ())  # a person's word stands for every one
        try:
            report = await self._call(
                OFFLOAD_ENGINES, f"{workflow.uuid4()}", "let go of", asked, blocks=False
            )
        except ActivityError as error:
            workflow.logger.warning("%s proves nothing: %s", self._id, text_of(error))
            return self._doubted()
        if not book.let_go(report):
            if left is not None:
                left += [r for r in report.replicas if not has_let_go(r)]
            return self._doubted()
        return self._result((report.evidence,) if report.evidence else (), asked)

    def _doubted(self) -> RoleResult:
        return self._result().model_copy(update={"state": GroupState.BLOCKED})

    async def _resolve(self, operation: RoleOperation) -> RoleResult:
        """A person's word for replicas of which no proof could be had, and for nothing else."""
        if operation.word is None:
            raise fail(PERMANENT, "resolve needs a person's word")
        for replica in self._book.failed:
            await self._take_word(replica, operation.word)
        await self._settle()
        if not self._book.holds_nothing:
            return self._result()
        left = list[ReplicaReport]()
        result = await self._prove_sleep(operation, left)
        for report in left:  # the word is about what slept on a host that is gone, too
            await self._take_word(report.replica, operation.word)
        return await self._prove_sleep(operation) if left else result

    async def _take_word(self, replica: int, word: str) -> None:
        """Refused where the replica's host still shows a process of it. Where the host does not
        answer, the store says that the grant is over."""
        given_up, told = None, None
        try:
            report = await self._call(
                FORGET_ENGINES, f"{workflow.uuid4()}", "forget", (replica,), word=word, blocks=False
            )
            told = report.replicas[0]
            if told.state is not ReplicaState.DEAD:
                if not (told.error or "").startswith(UNCONFIRMED):
                    raise fail(PERMANENT, f"{told.engine_id}: {told.error}")
                given_up = f"its host cannot be reached ({word})"
        except ActivityError as error:
            # Nobody knows whether the engine would refuse what is on its way there.
            raise fail(kind_of(error), f"say it again: {text_of(error)}") from error
        if replica in self._recoveries:
            self._book.recovered(await self._recoveries.resolve(replica, word))
        else:
            self._book.lose(told or self._book.replicas[replica])
            gone = RecoveryResult(
                replica=replica, state=RecoveryState.ABANDONED, resolved_by=word, why=given_up
            )
            self._book.recovered(gone)
        if given_up is not None:
            self._book.given_up[replica] = given_up
            self._book.out_of_reach.add(replica)

    # --- losses

    async def _watch(self) -> None:
        """While the group answers, know at once when a replica no longer does."""
        while True:
            await workflow.wait_condition(lambda: self._watchable)
            seen = self._book.incarnations()
            request = WatchRequest(group=self._start.group, incarnations=seen)
            watch = asyncio.create_task(WATCH_ENGINES(request, summary="watch"))
            watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await workflow.wait_condition(
                lambda watch=watch, seen=seen: (
                    watch.done() or not self._watchable or self._book.incarnations() != seen
                )
            )
            if not watch.done():
                watch.cancel()
                continue
            try:
                lost = watch.result().lost
            except ActivityError as error:
                workflow.logger.warning("the watch of %s ended: %s", self._id, text_of(error))
                await workflow.sleep(WATCH_PAUSE)
                continue
            if self._watchable:
                await self._lose(lost)

    async def _lose(self, lost: Sequence[ReplicaReport]) -> None:
        """A loss that the watch saw. What goes wrong with it must not end the watch: the group
        stays BLOCKED, and the next probe looks again."""
        try:
            async with self._at_work():
                await self._mend(lost)
        except FailureError as error:
            workflow.logger.error("mending %s: %s", self._id, text_of(error))

    @property
    def _watchable(self) -> bool:
        return not self._turn.locked() and self._book.state is GroupState.READY

    async def _mend(self, lost: Sequence[ReplicaReport]) -> None:
        """Unroute lost replicas and have them rebuilt; their siblings go on answering."""
        if not lost:
            return
        self._book.move(GroupEvent.REPLICA_LOST)
        for report in lost:
            self._book.lose(report)
        await self._tell_role()
        cause = lost[0].error or "it does not answer"
        await self._heal(self._book.failed, cause.splitlines()[0], rebuild=True)
        await self._settle()

    async def _heal(
        self, replicas: Iterable[int], cause: str, *, rebuild: bool
    ) -> tuple[StagedRef, ...]:
        """Recover replicas side by side; returns, with their evidence, when each is READY, gone
        or BLOCKED."""
        evidence = await asyncio.gather(
            *(self._recover(k, cause, rebuild=rebuild) for k in replicas)
        )
        return tuple(ref for refs in evidence for ref in refs)

    async def _recover(self, replica: int, cause: str, *, rebuild: bool) -> tuple[StagedRef, ...]:
        """One recovery. One that is BLOCKED goes on by itself and is heard of later."""
        if replica in self._recoveries:
            return ()
        fence = self._book.fence.seen
        assert fence is not None
        error = self._book.replicas[replica].error
        await self._recoveries.begin(
            RecoveryInput(
                run=self._start.run,
                group=self._start.group,
                replica=replica,
                fence=fence,
                weights=self._weights,
                rebuild=rebuild,
                cause=f"{cause}: {error}" if error and not error.startswith(cause) else cause,
            )
        )
        result = await self._recoveries.end_or_block(replica, self._hear_late)
        if result is None:
            return ()
        self._book.recovered(result)
        return result.evidence

    async def _hear_late(self, replica: int) -> None:
        """A recovery that was BLOCKED ended by proof, or by the word that ``resolve`` took."""
        async with self._at_work():
            if replica not in self._recoveries:
                return
            try:
                self._book.recovered(await self._recoveries.take(replica))
            except ApplicationError as error:
                workflow.logger.error("%s; a probe will look at its replica", text_of(error))
            else:
                await self._settle()

    async def _settle(self) -> None:
        """When no replica of a BLOCKED group is in doubt: in use, it answers again, with those
        that are gone rebuilt; otherwise the rest of it is put to sleep."""
        book = self._book
        if book.failed or book.state is not GroupState.BLOCKED:
            return
        if not self._in_use:
            await self._put_to_sleep()
            return
        await self._heal(book.dead, "its GPUs are free again", rebuild=True)
        if book.failed:
            return
        if book.ready:
            book.move(GroupEvent.LOST_REPLICA_PROVED_GONE)
            book.move(GroupEvent.OPENED)
        else:
            await self._put_to_sleep()

    async def _put_to_sleep(self) -> None:
        """What is still awake in a BLOCKED group lets go, and nothing of it loads under its token
        again; SLEEPING if nothing is in doubt then."""
        book = self._book
        self._in_use = False
        book.begin_drain(book.holding)
        if asked := tuple(k for k in book.askable if k not in book.failed):
            try:
                report = await self._call(
                    OFFLOAD_ENGINES, f"{workflow.uuid4()}", "put to sleep", asked, blocks=False
                )
            except ActivityError as error:
                for replica in asked:  # nobody knows what they did: each is stopped, with proof
                    book.lose(book.unknown(replica, text_of(error)))
            else:
                book.settle_drain(report)
            await self._heal(book.failed, "it did not let go", rebuild=False)
        if not book.failed:
            book.move(GroupEvent.SLEEP_PROVED)

    # --- pieces

    async def _tell_role(self) -> None:
        """The role learns what the group has become before it hears how the operation ended."""
        self._show()
        role = f"{self._start.run.run}.{self._start.group.role}"
        await workflow.get_external_workflow_handle(role).signal("group_changed", self._snapshot())

    def _admit(self, operation: RoleOperation) -> None:
        """The workflow's own fence: an operation of an earlier grant is refused here already."""
        if operation.fence is None:
            raise fail(PERMANENT, f"{operation.method} needs the fence token of a grant")
        try:
            loads = operation.method == "onload"
            self._book.fence.admit(operation.fence, loads=loads)
        except StaleFence as stale:
            raise fail(PERMANENT, str(stale)) from stale

    async def _call(
        self,
        call: Call[EngineOperation, GroupReport],
        operation_id: str,
        doing: str,
        replicas: tuple[int, ...],
        weights: WeightsRef | None = None,
        *,
        word: str | None = None,
        blocks: bool = True,
    ) -> GroupReport:
        """Run a lifecycle activity. After a lost worker the same operation id is asked again: the
        engines' own actors join it or return its recorded result. Anything else unclear blocks."""
        request = EngineOperation(
            group=self._start.group,
            operation_id=operation_id,
            fence=self._book.fence.seen or FenceToken(counter=0, grant_id="none"),
            weights=weights,
            replicas=replicas,
            word=word,
            ends_grant=not self._in_use,
        )
        summary = f"{self._start.group.role} {doing}"
        for attempt in range(1, ASK_AGAIN + 1):
            try:
                return await call(request, summary=summary)
            except ActivityError as error:
                if kind_of(error) == PERMANENT or attempt == ASK_AGAIN:
                    if not blocks:
                        raise
                    self._book.move(GroupEvent.OPERATION_UNCONFIRMED)
                    raise fail(kind_of(error), f"{summary}: {text_of(error)}") from error
        raise AssertionError("unreachable")

    def _told(self, doing: str) -> str:
        return (
            f"{self._start.group.role} {doing}: {self._recoveries.blocked() or self._book.errors()}"
        )

    def _result(
        self, evidence: tuple[StagedRef, ...] = (), holders: tuple[int, ...] | None = None
    ) -> RoleResult:
        reports = [self._book.replicas[k] for k in self._book.ready]
        versions = {r.weight_version for r in reports}
        digests = {r.weights_digest for r in reports}
        asked = self._book.usable if holders is None else holders
        return RoleResult(
            evidence=evidence,
            holders=tuple(self._start.group.engine_id(k) for k in asked),
            weight_version=versions.pop() if len(versions) == 1 else None,
            weights_digest=digests.pop() if len(digests) == 1 else None,
            state=self._book.state,
            why=self._recoveries.blocked(),
        )

    def _snapshot(self) -> GroupSnapshot:
        return self._book.snapshot().model_copy(update={"stuck": self._recoveries.blocked()})

    def _show(self) -> None:
        book = self._book
        show_state(book.state)
        rows = [(r.engine_id, f"{r.state} {r.error or ''}") for r in book.replicas.values()]
        rows += self._recoveries.rows()
        rows += [(f"replica {k}", f"given up: {why}") for k, why in book.given_up.items()]
        doing = f"{book.spec.role} {book.spec.model} is **{book.state}**."
        if book.fence.seen is not None:
            rows.append(("fence", str(book.fence.seen)))
        show_details(doing, rows)


def _proved(seen: Sequence[ReplicaReport], fence: FenceToken | None) -> GroupEvent | None:
    """What the replicas' own answers prove under ``fence``; None: nothing."""
    states = {r.state for r in seen}
    # One that has not seen the token may be about to: what was asked under it can still come.
    if any(r.fence != fence for r in seen):
        return None
    if states == {ReplicaState.DEAD}:
        return GroupEvent.RELEASE_PROVED
    if states <= {ReplicaState.SLEEPING, ReplicaState.DEAD}:
        return GroupEvent.SLEEP_PROVED
    return GroupEvent.READY_PROVED if states == {ReplicaState.READY} else None
