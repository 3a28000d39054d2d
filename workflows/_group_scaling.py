"""The engine group's part of a scale operation: its replica table, and what of it lies outside."""

from collections.abc import Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import ReplicaReport
from relax_infer.contracts.scale import MemberAsk, Members, ScaleFailure
from relax_infer.machines import GroupState, ReplicaState
from workflows._calls import FORGET_ENGINES, ONLOAD_ENGINES
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._group_proving import GroupProving
from workflows._remains import clear, release


class GroupScaling(GroupProving):
    """A replica is made and ended outside of the group, by ScaleRole. It enters the table when it
    is right, in one turn with the opening of its gate, and leaves it before anything of it ends."""

    async def _scale_step(self, ask: MemberAsk, operation_id: str) -> Members:
        outsiders = self._book.outsiders
        match ask.method:
            case "members":
                if ask.until_ready:
                    await self._wait(lambda: self._watchable, ask.timeout)
            case "reserve":
                numbers = outsiders.reserve(ask.number, ask.operation)
                return self._members().model_copy(update={"reserved": numbers})
            case "placed":
                assert ask.placement is not None
                outsiders.place(ask.placement)
            case "adopt":
                return await self._adopt(ask, operation_id)
            case "leave":
                return await self._leave(ask)
            case "stay":
                assert ask.replica is not None
                self._book.stay(ask.replica)
                await self._tell_role()
            case "settle":
                await self._note_left(ask)
            case "abandon":
                outsiders.abandon(ask.operation)
                await self._tell_role()
            case _:
                raise fail(PERMANENT, f"a group cannot {ask.method}: its role can")
        return self._members()

    async def _adopt(self, ask: MemberAsk, operation_id: str) -> Members:
        """Weights as its siblings have them, the canary, the gate, the table; in one turn, so that
        no change of weights comes between."""
        placement, book = ask.placement, self._book
        assert placement is not None
        async with self._at_work():
            if book.state is not GroupState.READY:
                why = f"its group is {book.state}"
                return self._members(ScaleFailure.WEIGHT_UPDATE_RUNNING, why)
            try:
                told = await self._call(
                    ONLOAD_ENGINES,
                    operation_id,
                    f"check and open {book.spec.engine_id(placement.replica)}",
                    (placement.replica,),
                    self._weights,
                    blocks=False,
                    spec=book.spec.alone(placement),
                )
            except ActivityError as error:
                return self._members(ScaleFailure.UNKNOWN, text_of(error))
            (report,) = told.replicas
            if report.state is not ReplicaState.READY:
                why = report.error or f"it is {report.state}"
                return self._members(ScaleFailure.HEALTH_CHECK_FAILED, why)
            if (why := self._other_weights(report)) is not None:
                return self._members(ScaleFailure.WEIGHT_SYNC_FAILED, why)
            book.adopt(placement, report)
        return self._members()

    def _other_weights(self, report: ReplicaReport) -> str | None:
        held = {_weights_of(self._book.replicas[k]) for k in self._book.ready}
        if _weights_of(report) in held:
            return None
        return f"it holds weights {_weights_of(report)}, its siblings {sorted(held, key=str)}"

    async def _leave(self, ask: MemberAsk) -> Members:
        replica, book = ask.replica, self._book
        assert replica is not None
        if not await self._wait(lambda: not self._turn.locked(), ask.timeout):
            why = f"the group was at work for {ask.timeout:g} s"
            return self._members(ScaleFailure.WEIGHT_UPDATE_RUNNING, why)
        async with self._at_work():
            if replica in book.outsiders:
                return self._members()
            if replica in self._recoveries:
                return self._members(ScaleFailure.RECOVERY_RUNNING, self._stuck)
            if book.spec.placement_of(replica) is None:
                return self._members(ScaleFailure.UNKNOWN, "it was not added, or it is gone")
            if book.ready == (replica,):
                why = "it is the last one that answers"
                return self._members(ScaleFailure.UNKNOWN, why)
            book.leave(replica, ask.operation)
        return self._members()

    async def _note_left(self, ask: MemberAsk) -> None:
        """How work on an outsider ended."""
        outsiders = self._book.outsiders
        if ask.record is not None:
            outsiders.put(ask.record)
        elif ask.replica is not None:
            outsiders.forget(ask.replica)
            outsiders.urls.pop(ask.replica, None)
        await self._tell_role()

    async def _wait_for_leavers(self) -> None:
        """Weights do not change, and nothing is released, while a replica answers what it had
        admitted; its operation has a deadline."""
        if self._book.outsiders.leave:
            patience = 0.75 * self._start.operation_timeout
            await self._wait(lambda: not self._book.outsiders.leave, patience)

    async def _end_added(self) -> None:
        """The group has stopped: so does what lies outside of it, and every GPU goes back.

        Raises an ApplicationError of type Unconfirmed, naming what is left.
        """
        book, run = self._book, self._start.run
        wrong: list[str] = []
        for record in book.outsiders.all:
            if book.fence.seen is None:
                break  # nothing was ever launched
            left = await clear(record, run, book.spec, book.fence.seen, f"{workflow.uuid4()}")
            if left is None:
                book.outsiders.forget(record.replica)
            else:
                book.outsiders.put(left)
                wrong.append(f"{book.spec.engine_id(left.replica)}: {left.why}")
        for each in book.spec.added:
            try:
                await release(run, book.spec, each.replica)
            except ActivityError as error:
                wrong.append(f"{each.placement_group}: {text_of(error)}")
        if wrong:
            raise fail(UNCONFIRMED, "; ".join(wrong))

    async def _take_word_for_outsiders(self, word: str) -> None:
        """As for the group's own replicas: refused where the host shows a process."""
        book = self._book
        for record in book.outsiders.all:
            if record.stopped or record.placement is None or record.stage != "left":
                continue
            try:
                told = await self._call(
                    FORGET_ENGINES,
                    f"{workflow.uuid4()}",
                    "forget",
                    (record.replica,),
                    word=word,
                    blocks=False,
                    spec=book.spec.alone(record.placement),
                )
            except ActivityError as error:
                raise fail(kind_of(error), f"say it again: {text_of(error)}") from error
            (seen,) = told.replicas
            unreachable = (seen.error or "").startswith(UNCONFIRMED)
            if seen.state is not ReplicaState.DEAD and not unreachable:
                raise fail(PERMANENT, f"{seen.engine_id}: {seen.error}")
            book.outsiders.put(record.model_copy(update={"stopped": True, "why": word}))

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true in time; others may have waited for the same."""
        try:
            await workflow.wait_condition(condition, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return False
        return True

    def _members(self, failure: ScaleFailure | None = None, why: str | None = None) -> Members:
        book = self._book
        return Members(
            spec=book.spec,
            state=book.state,
            fence=book.fence.seen,
            weights=self._weights,
            replicas=tuple(book.replicas[k] for k in sorted(book.replicas)),
            urls=book.outsiders.urls,
            outsiders=book.outsiders.all,
            snapshot=self._next_snapshot(),
            failure=failure,
            why=why,
        )


def _weights_of(report: ReplicaReport) -> tuple[int | None, str | None]:
    return report.weight_version, report.weights_digest
