"""What is known of one replica: its state, and looks at its engine that change nothing."""

import asyncio
from typing import TYPE_CHECKING

from relax_infer.contracts.engines import ReplicaReport
from relax_infer.contracts.failures import PermanentError, RelaxError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.process import EngineProcess
from relax_infer.machines import ReplicaState

if TYPE_CHECKING:
    from relax_infer.engines.replica import EngineReplica

AWAKE = (ReplicaState.READY, ReplicaState.ONLOADING)
_RECALL_SECONDS = 20.0
"""For followers to say what an earlier actor of the head left with them."""


class ReplicaReports:
    """Reports of one replica. Safe while an operation on it is carried out."""

    def __init__(self, replica: "EngineReplica") -> None:
        self._replica = replica

    async def report(self) -> ReplicaReport:
        """What is known now; asks the engine."""
        replica = self._replica
        try:
            async with asyncio.timeout(_RECALL_SECONDS):
                await replica.recall()
        except (RelaxError, TimeoutError) as unknown:
            # Nothing is left on this host; the others have not said.
            why = str(unknown) or "its followers do not answer"
            return self._told(ReplicaState.FAILED, None, why)
        state, error, engine = replica.state, replica.error, replica.engine
        fence = replica.files.fence()
        if engine is not None and state in (*AWAKE, ReplicaState.SLEEPING):
            fence, error = await self._look(engine, state)
            if error is not None and state is replica.state:
                state = ReplicaState.FAILED
        return self._told(state, engine, error).model_copy(update={"fence": fence})

    async def health(self) -> ReplicaReport:
        """A report in which a READY replica that lost a process on any of its nodes, or whose
        engine has said nothing for ``spec.health_timeout`` seconds, is FAILED. Others are not
        judged."""
        replica = self._replica
        engine = replica.engine
        if engine is None or replica.state is not ReplicaState.READY:
            return await self.report()
        lost = await self._lost(engine)
        if replica.state is not ReplicaState.READY or replica.engine is not engine:
            return await self.report()
        return self._told(ReplicaState.FAILED if lost else ReplicaState.READY, engine, lost)

    async def read_weights(self) -> ReplicaReport:
        """A report whose version and digest were read from the engine just now.

        FAILED if they are not what was loaded. An engine without resident weights has none.
        """
        replica = self._replica
        report = await self.report()
        readable = replica.state in AWAKE and "weights" in replica.resident.tags
        if not readable or report.error is not None:
            return report.model_copy(update={"weight_version": None, "weights_digest": None})
        try:
            await replica.check_weights()
        except (UnconfirmedError, PermanentError) as error:
            return report.model_copy(update={"state": ReplicaState.FAILED, "error": str(error)})
        return report.model_copy(update={"weights_digest": replica.resident.digest})

    async def _lost(self, engine: EngineProcess) -> str | None:
        if lost := await self._replica.nodes.lost():
            return lost
        patience = self._replica.spec.health_timeout
        silent = await self._replica.pulse.silence(engine, patience)
        if silent > patience:
            return f"it has given no sign of life for {silent:.0f} s"
        return None

    async def _look(
        self, engine: EngineProcess, state: ReplicaState
    ) -> tuple[FenceToken | None, str | None]:
        """The token that the fence has seen, and what contradicts ``state``."""
        replica = self._replica
        if engine.exited():
            return replica.files.fence(), engine.lost()
        try:
            status = await engine.control.status()
        except (UnconfirmedError, PermanentError) as unanswered:
            return replica.files.fence(), str(unanswered)
        token = FenceToken.model_validate(status["fence"])
        if status["ready"] == (state is ReplicaState.READY):
            return token, await replica.nodes.lost()
        return token, f"it is {state} but its gate is {'open' if status['ready'] else 'shut'}"

    def _told(
        self, state: ReplicaState, engine: EngineProcess | None, error: str | None
    ) -> ReplicaReport:
        replica = self._replica
        return ReplicaReport(
            replica=replica.replica,
            engine_id=replica.engine_id,
            state=state,
            base_url=engine.holder.base_url if engine and state is ReplicaState.READY else None,
            incarnation=engine.holder.processes.incarnation if engine else None,
            weight_version=replica.resident.version,
            weights_digest=replica.resident.digest,
            fence=replica.files.fence(),
            error=error,
            note=replica.resident.note,
        )
