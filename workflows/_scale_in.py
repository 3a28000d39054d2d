"""Scale-in: a replica loses its callers, answers what it has admitted, ends, and gives its GPUs
back."""

import asyncio

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

from relax_infer.contracts.scale import (
    DrainAnswer,
    DrainAsk,
    Members,
    OutsiderRecord,
    ScaleFailure,
    ScaleReplica,
)
from relax_infer.machines import ScaleEvent
from workflows._calls import DRAIN_ENGINE
from workflows._failures import text_of
from workflows._scale_connect import LetGo
from workflows._scale_work import ScaleWork

_E, _F = ScaleEvent, ScaleFailure


class ScaleIn:
    """Replicas go side by side; one that cannot is told, and the others go on."""

    def __init__(self, work: ScaleWork, members: Members) -> None:
        self._work = work
        self._spec = members.spec
        self._left = {record.replica: record for record in members.outsiders}

    async def run(
        self,
        replicas: tuple[int, ...],
        unknown_urls: tuple[str, ...],
        release: tuple[str, ...] = (),
    ) -> None:
        """``release``: engines of others. They lose their callers and are drained, no more."""
        work = self._work
        await work.move(_E.IN_STARTED)
        for k in replicas:
            work.row(k, outcome="at work")
        work.rows += [
            ScaleReplica(url=url, outcome="failed", failure=_F.INVALID_ENGINE_ADDRESS)
            for url in unknown_urls
        ]
        drained, let_go = await asyncio.gather(
            asyncio.gather(*(self._let_go(k) for k in replicas)),
            asyncio.gather(*(LetGo(work, self._spec, self._patience).one(u) for u in release)),
        )
        going = [record for record in drained if record is not None]
        if not going and not any(let_go):
            await work.move(_E.ALL_FAILED)
            return
        await work.move(_E.DRAINED)
        gone = await asyncio.gather(*(self._end(record) for record in going))
        if all((*gone, *let_go)) and len(going) == len(replicas) and not unknown_urls:
            await work.move(_E.RELEASE_PROVED)
        else:
            await work.move(_E.SOME_FAILED if any((*gone, *let_go)) else _E.ALL_FAILED)

    async def _let_go(self, replica: int) -> OutsiderRecord | None:
        """Router and gateway do not name it any more, and it has answered its last request. None:
        it must not be ended now."""
        try:
            record = self._left.get(replica) or await self._unrouted(replica)
            if record is None:
                return None
            return await self._drained(record)
        except FailureError as error:
            self._work.row(replica, outcome="unchanged", failure=_F.UNKNOWN, why=text_of(error))
            return None

    async def _unrouted(self, replica: int) -> OutsiderRecord | None:
        members = await self._work.ask_role("leave", replica=replica, timeout=self._patience)
        if members.failure is not None:
            self._work.row(replica, outcome="unchanged", failure=members.failure, why=members.why)
            return None
        return next(r for r in members.outsiders if r.replica == replica)

    async def _drained(self, record: OutsiderRecord) -> OutsiderRecord | None:
        work = self._work
        skip = record.drained or record.stopped or record.placement is None
        if skip or work.request.force:
            return record
        assert record.placement is not None
        ask = DrainAsk(
            group=self._spec.alone(record.placement),
            replica=record.replica,
            timeout=self._patience,
        )
        name = self._spec.engine_id(record.replica)
        draining = asyncio.create_task(DRAIN_ENGINE(ask, summary=f"last requests of {name}"))
        await work.until(draining.done)
        if not draining.done():
            draining.cancel()  # the role goes down: nobody waits for these answers
            await workflow.wait_condition(draining.done)
            return record
        if (why := self._why_not(draining)) is None:
            return record.model_copy(update={"drained": True})
        left = {"stage": "left", "failure": _F.DRAIN_TIMEOUT, "why": why}
        await work.settle(record.replica, record.model_copy(update=left))
        work.row(record.replica, outcome="left", failure=_F.DRAIN_TIMEOUT, why=why)
        return None

    def _why_not(self, draining: "asyncio.Task[DrainAnswer]") -> str | None:
        try:
            left = draining.result().left
        except ActivityError as error:
            return text_of(error)
        return f"{left} requests were not answered in {self._patience:g} s" if left else None

    async def _end(self, record: OutsiderRecord) -> bool:
        replica = record.replica
        try:
            left = await self._work.end(record)
        except FailureError as error:
            self._work.row(replica, outcome="left", failure=_F.UNKNOWN, why=text_of(error))
            return False
        if left is None:
            self._work.row(replica, outcome="removed", failure=None, why=None)
        else:
            self._work.row(replica, outcome="left", failure=left.failure, why=left.why)
        return left is None

    @property
    def _patience(self) -> float:
        return self._work.request.drain_timeout or self._spec.drain_timeout
