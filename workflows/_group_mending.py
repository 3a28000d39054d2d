"""The mending of an engine group: lost replicas are noticed, recovered, and the rest settled."""

import asyncio
from collections.abc import Iterable, Sequence

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

from relax_infer.contracts.engines import ReplicaReport, WatchRequest
from relax_infer.contracts.recovery import RecoveryInput
from relax_infer.contracts.refs import StagedRef
from relax_infer.machines import GroupEvent, GroupState
from workflows._calls import OFFLOAD_ENGINES, WATCH_ENGINES
from workflows._failures import text_of
from workflows._group_core import GroupCore

WATCH_PAUSE = 10.0
"""Seconds before a watch that could not be kept is begun again."""


class GroupMending(GroupCore):
    """Each loss is shown before it is mended; siblings go on answering meanwhile."""

    async def _watch(self) -> None:
        """While the group answers, know at once when a replica no longer does."""
        while True:
            try:
                await self._watch_once()
            except Exception as error:
                # Nobody would notice a loss any more; the error alone is no reason for that.
                workflow.logger.exception("the watch of %s: %s", self._id, text_of(error))
                await workflow.sleep(WATCH_PAUSE)

    async def _watch_once(self) -> None:
        """Until a loss, or until there is something else to watch."""
        await workflow.wait_condition(lambda: self._watchable)
        seen = self._book.incarnations()
        request = WatchRequest(group=self._book.spec, incarnations=seen)
        watch = asyncio.create_task(WATCH_ENGINES(request, summary="watch"))
        watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await workflow.wait_condition(
            lambda: watch.done() or not self._watchable or self._book.incarnations() != seen
        )
        if not watch.done():
            watch.cancel()
            return
        try:
            lost = watch.result().lost
        except ActivityError as error:
            workflow.logger.warning("the watch of %s ended: %s", self._id, text_of(error))
            await workflow.sleep(WATCH_PAUSE)
            return
        if self._watchable:
            await self._lose(lost, seen)

    async def _lose(self, lost: Sequence[ReplicaReport], seen: dict[int, str]) -> None:
        """A loss that the watch saw. What goes wrong with it must not end the watch: the group
        stays BLOCKED, and the next probe looks again.

        Args:
            seen: the incarnations that were watched.
        """
        try:
            async with self._at_work():
                # Another operation may have had its turn before: it let go of what was lost.
                if self._book.state is GroupState.READY and self._book.incarnations() == seen:
                    await self._mend(lost)
        except FailureError as error:
            workflow.logger.error("mending %s: %s", self._id, text_of(error))

    @property
    def _watchable(self) -> bool:
        return not self._turn.locked() and self._book.state is GroupState.READY

    async def _mend(self, lost: Sequence[ReplicaReport]) -> None:
        """Unroute lost replicas and have them rebuilt; their siblings go on answering."""
        lost = [report for report in lost if report.replica in self._book.spec.numbers]
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
                group=self._book.spec,
                replica=replica,
                fence=fence,
                weights=self._weights,
                rebuild=rebuild,
                cause=f"{cause}: {error}" if error and not error.startswith(cause) else cause,
            )
        )
        try:
            result = await self._recoveries.end_or_block(replica, self._hear_late)
        except ApplicationError as ended:  # by hand: a probe, or a person's word, has to say
            workflow.logger.error("%s; a probe will look at its replica", text_of(ended))
            self._book.forsaken(replica, text_of(ended))
            return ()
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
        if not self._book.in_use:
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
        self._book.in_use = False
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
