"""The Ray actor of one replica's head: detached, named, in namespace ``relax-<run>``.

It holds no GPU memory itself; its server does, in a session of its own that outlives the actor.
An actor that is made again finds what the last one left in the files of its host.
"""

import asyncio
import logging
import os
import time
from typing import Literal

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    ReleaseEvidence,
    ReplicaReport,
)
from relax_infer.contracts.failures import PermanentError, RelaxError, TransientError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.engines.follower import Follower
from relax_infer.engines.node import NodeReport
from relax_infer.engines.operations import OperationTable
from relax_infer.engines.replica import EngineReplica
from relax_infer.engines.seats import Sender
from relax_infer.machines import IllegalTransition, ReplicaState
from relax_infer.telemetry import about, configure_actor
from relax_infer.telemetry.traces import span

log = logging.getLogger(__name__)

Kind = Literal["launch", "onload", "load_weights", "offload", "stop", "forget"]
_RELEASES: tuple[Kind, ...] = ("offload", "stop", "forget")


class ReplicaOutcome(Message):
    """How an operation on one replica ended; failures are told, not raised."""

    report: ReplicaReport
    evidence: ReleaseEvidence | None = None
    stale: FenceToken | None = None
    """The token seen before, because of which the operation was refused."""


class ReplicaDescription(Message):
    """Where a replica is on its hosts, for people and tests."""

    replica: int
    engine_id: str
    state: ReplicaState
    actor_pid: int
    incarnation: str | None = None
    session: int | None = None
    pids: tuple[int, ...] = ()
    """Process tree of the head's server as it was when it became ready."""
    base_url: str | None = None
    """Public, fenced address, also while closed."""
    socket: str | None = None
    log: str | None = None
    request_log: str | None = None
    nodes: tuple[NodeReport, ...] = ()
    """Every node of it, the head first; a follower without an actor is left out."""


class EngineActor:
    """Carries out operations on one replica, each once, in turn, under fence tokens."""

    def __init__(
        self, spec: EngineGroupSpec, replica: int, pool: str = "", sender: Sender | None = None
    ) -> None:
        """
        Args:
            pool: Ray's id of the placement group that the actor is in.
            sender: of weights to a process group; None: the run's trainer.
        """
        name = f"{spec.actor_name(replica)}.actor"
        configure_actor(name, spec.run, role=spec.role, replica=replica)
        followers = [Follower(spec, replica, node) for node in range(1, spec.nodes_per_replica)]
        self._replica = EngineReplica(spec, replica, pool, followers, sender)
        self._fence = self._replica.files.fence_memory()
        self._operations = OperationTable[ReplicaOutcome]()
        self._turn = asyncio.Lock()

    @property
    def seen(self) -> FenceToken | None:
        """The highest token that an operation on the replica ever came with."""
        return self._fence.seen

    async def ping(self) -> int:
        return os.getpid()

    async def operate(self, kind: Kind, op: EngineOperation) -> ReplicaOutcome:
        """A known operation id joins or gets the recorded outcome, whatever its token is now."""
        return await self._operations.run(op.operation_id, kind, lambda: self._told(kind, op))

    async def _told(self, kind: Kind, op: EngineOperation) -> ReplicaOutcome:
        with (
            about(fence=str(op.fence)),
            span(f"engine {kind}", parent=op.traceparent, operation=op.operation_id) as note,
        ):
            log.info("%s begins", kind, extra={"operation": op.operation_id})
            began = time.monotonic()
            outcome = await self._once(kind, op)
            told = {
                "operation": op.operation_id,
                "seconds": round(time.monotonic() - began, 3),
                "state": outcome.report.state.value,
            }
            note("relax.state", outcome.report.state.value)
            if outcome.report.error is None:
                log.info("%s is done", kind, extra=told)
            else:
                log.warning("%s failed: %s", kind, outcome.report.error, extra=told)
            return outcome

    async def _once(self, kind: Kind, op: EngineOperation) -> ReplicaOutcome:
        try:
            self._replica.head.check_place(loads=kind not in _RELEASES)
            await self._check_open(kind, op.fence)
            self._admit(kind, op.fence)
            async with self._turn:
                # Another grant may have come while this one waited, or this one may have ended.
                await self._check_open(kind, op.fence)
                self._admit(kind, op.fence)
                outcome = await self._carry_out(kind, op)
                if kind in _RELEASES and op.ends_grant and outcome.report.error is None:
                    self._fence.end()
                    self._replica.files.write_fence(self._fence)
                return outcome
        except StaleFence as stale:
            report = await self._replica.reports.report()
            return ReplicaOutcome(
                report=report.model_copy(update={"error": str(stale)}), stale=stale.seen
            )
        except TransientError as error:
            return await self._failed(error)
        except RelaxError as misplaced:
            failed = await self._failed(misplaced)
            told = failed.report.model_copy(update={"state": ReplicaState.FAILED})
            return failed.model_copy(update={"report": told})

    async def _check_open(self, kind: Kind, token: FenceToken) -> None:
        """While its host was cut off, a person may have said that nothing of it is left."""
        if kind not in _RELEASES:
            await asyncio.to_thread(self._replica.closed.check, token)

    async def _failed(self, error: Exception) -> ReplicaOutcome:
        report = await self._replica.reports.report()
        told = f"{getattr(error, 'kind', type(error).__name__)}: {error}"
        return ReplicaOutcome(report=report.model_copy(update={"error": told}))

    async def _carry_out(self, kind: Kind, op: EngineOperation) -> ReplicaOutcome:
        evidence: ReleaseEvidence | None = None
        try:
            match kind:
                case "launch":
                    await self._replica.launch(op)
                case "onload":
                    await self._replica.onload(op)
                case "load_weights":
                    await self._replica.load_weights(op)
                case "offload":
                    evidence = await self._replica.offload(op)
                case "stop":
                    evidence = await self._replica.stop(op)
                case "forget":
                    await self._replica.forget(op)
        except (RelaxError, IllegalTransition, OSError) as error:
            return await self._failed(error)
        return ReplicaOutcome(report=await self._replica.reports.report(), evidence=evidence)

    def _admit(self, kind: Kind, token: FenceToken) -> None:
        known = self._fence.seen
        self._fence.admit(token, loads=kind not in _RELEASES)
        if token != known:
            self._replica.files.write_fence(self._fence)

    async def probe(self) -> ReplicaReport:
        self._replica.head.check_place()
        return await self._replica.reports.report()

    async def health(self) -> ReplicaReport:
        self._replica.head.check_place()
        return await self._replica.reports.health()

    async def read_weights(self) -> ReplicaReport:
        self._replica.head.check_place()
        async with self._turn:
            return await self._replica.reports.read_weights()

    async def settle_requests(self, prefix: str, timeout: float) -> int:
        self._replica.head.check_place()

        def current() -> FenceToken:
            if self._fence.seen is None:
                raise PermanentError(
                    f"Engine {self._replica.engine_id} runs, and no grant of it is known.",
                    cure="Onload it under a grant.",
                )
            return self._fence.seen

        return await self._replica.settle(prefix, timeout, current)

    async def in_flight(self) -> int:
        self._replica.head.check_place()
        return await self._replica.in_flight()

    async def describe(self) -> ReplicaDescription:
        engine = self._replica.engine
        where = (
            {}
            if engine is None
            else {
                "incarnation": engine.holder.processes.incarnation,
                "session": engine.holder.processes.session,
                "pids": tuple(stamp.pid for stamp in engine.holder.processes.tree),
                "base_url": engine.holder.base_url,
                "socket": engine.holder.socket,
                "log": engine.holder.log,
                "request_log": engine.holder.request_log,
            }
        )
        return ReplicaDescription(
            replica=self._replica.replica,
            engine_id=self._replica.engine_id,
            state=self._replica.state,
            actor_pid=os.getpid(),
            nodes=await self._replica.nodes.reports(),
            **where,
        )
