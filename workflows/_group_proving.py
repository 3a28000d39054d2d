"""Where an engine group stands after an answer was lost: by probes, by proof, by a word."""

from collections.abc import Sequence

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import ReplicaReport
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import RoleOperation, RoleResult
from relax_infer.contracts.recovery import RecoveryResult
from relax_infer.machines import GroupEvent, GroupState, RecoveryState, ReplicaState
from workflows._calls import FORGET_ENGINES, OFFLOAD_ENGINES, PROBE_ENGINES
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._group_book import has_let_go
from workflows._group_mending import GroupMending


class GroupProving(GroupMending):
    """Only what is proved, or what a person vouches for, changes the book."""

    async def _probe(self, operation: RoleOperation) -> RoleResult:
        """What every replica's own answer proves under the asked token. What is up stays so; a
        replica that failed is stopped with proof, and what sleeps says so with evidence."""
        await self._recoveries.look_again()
        report = await PROBE_ENGINES(self._book.spec, summary="probe")
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
                    self._book.in_use = True
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
        self._book.in_use = False
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
