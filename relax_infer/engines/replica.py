"""One replica: its state, and the operations that change it.

Lives in the actor of its head; knows nothing of Ray. Every operation is carried out under a fence
token by one caller at a time, and leaves the replica in a state of ``relax_infer.machines.REPLICA``
that says whether it still counts as a holder of its GPUs.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_infer.contracts.engines import (
    RESIDENT_TAGS,
    EngineGroupSpec,
    EngineOperation,
    ReleaseEvidence,
)
from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.closed_grants import closed_grants
from relax_infer.engines.control import EngineControl
from relax_infer.engines.drain import close_before_end, confirm_drained, drain, settle
from relax_infer.engines.evidence import memory_doubts, release_evidence
from relax_infer.engines.memory import NodeUse
from relax_infer.engines.node import EngineNode
from relax_infer.engines.nodes import FollowerNode, ReplicaNodes
from relax_infer.engines.process import EngineProcess
from relax_infer.engines.pulse import Pulse
from relax_infer.engines.reports import AWAKE, ReplicaReports
from relax_infer.engines.resident import Resident, weights_folder
from relax_infer.engines.seats import Place, Sender, TrainerSender
from relax_infer.machines import REPLICA, ReplicaEvent, ReplicaState

_E = ReplicaEvent
_DYING_SECONDS = 2.0
"""Between a killed server's closed socket and the end of its process."""
_GIVE_BACK_SECONDS = 20.0
"""For a driver to free the memory of processes that are gone."""


class EngineReplica:
    """State and operations of one replica. Not for two callers at once."""

    def __init__(
        self,
        spec: EngineGroupSpec,
        replica: int,
        pool: str = "",
        followers: Sequence[FollowerNode] = (),
        sender: Sender | None = None,
    ) -> None:
        """
        Args:
            followers: the further nodes of the replica; this host is its head's.
            sender: of weights to a process group; None: the run's trainer.
        """
        self.spec, self.replica = spec, replica
        self.head = head = EngineNode(spec, replica, 0, pool)
        self.files = head.files
        self.closed = closed_grants(spec, replica)
        self.nodes = ReplicaNodes(head, followers)
        self.resident = Resident(self.engine_id, self.files)
        self._sender = sender or TrainerSender(spec.namespace)
        self.error: str | None = None
        self.pulse = Pulse()
        self.reports = ReplicaReports(self)
        self.state = ReplicaState.DEAD
        if head.holds:
            # An actor before this one started it. Its answers cannot be trusted; only a release
            # proof leads on from here.
            self._found(head.left())

    @property
    def engine_id(self) -> str:
        return self.spec.engine_id(self.replica)

    @property
    def engine(self) -> EngineProcess | None:
        """The head's server: the one that is asked."""
        return self.nodes.engine

    async def launch(self, op: EngineOperation) -> None:
        """Start the server, gate closed, weights resident and checked. Nothing if it runs."""
        try:
            if await self._launch(op):
                await self.check_weights()
        except BaseException as error:
            self._fail(_E.ONLOAD_FAILED, error)
            raise

    async def onload(self, op: EngineOperation) -> None:
        """Everything resident, weights as asked, and, unless told otherwise, admission open."""
        token = op.fence
        place = Place(op.group, self.replica, op, self._sender)
        try:
            await self._launch(op)
            if self.state is ReplicaState.READY:
                if self.resident.current(op.weights) and op.open_admission:
                    await self._control.open(token)
                    self.pulse.begin()
                    return
                self._advance(_E.WEIGHTS_UPDATE_STARTED)
                patience = op.group.weights.drain_deadline
                await drain(self._control, token, self.spec.drain_timeout, patience)
            elif self.state is ReplicaState.SLEEPING:
                self._advance(_E.ONLOAD_STARTED)
            limit, resident = self.spec.drain_timeout, self.resident
            await resident.resume(self._control, ("weights",), token, limit)
            if op.weights is not None and not resident.current(op.weights):
                await resident.load(self._control, op.weights, token, op.group, place)
            await resident.resume(self._control, RESIDENT_TAGS, token, limit)
            await self._control.continue_generation(token)
            await self.check_weights()
            await resident.check_canary(self._control, limit)
            await self._control.close(token)
            await confirm_drained(self._control, token, self.spec.drain_timeout)
            if op.open_admission:
                await self._control.open(token)
                self._advance(_E.OPENED)
                self.pulse.begin()
        except BaseException as error:
            self._fail(_E.ONLOAD_FAILED, error)
            raise
        finally:
            await place.give_up("it takes no part")

    async def load_weights(self, op: EngineOperation) -> None:
        """Load ``op.weights`` behind a closed gate, read them back, open as asked."""
        await self._notice_death()
        if op.weights is None:
            raise PermanentError(f"Operation {op.operation_id} names no weights to load.")
        if self.state not in AWAKE:
            raise PermanentError(
                f"Engine {self.engine_id} is {self.state}: weights are loaded into an engine that"
                " is awake.",
                cure="Onload it under a grant first.",
            )
        await self.onload(op)

    async def offload(self, op: EngineOperation) -> ReleaseEvidence | None:
        """Let go of the GPUs and say on what evidence; what cannot be told raises.

        With kind ``restart`` it lets go by ending, and so does a replica that failed, since its
        answers prove nothing. Asked again, it looks again.
        """
        await self._notice_death()
        if self.state is ReplicaState.DEAD:
            self.error = None  # of the launch that failed; this operation did not
            return await self._free(op)
        asleep = self.state is ReplicaState.SLEEPING
        by_ending = self.spec.offload == "restart" or self.state is ReplicaState.FAILED
        if not asleep:
            self._advance(_E.DRAIN_STARTED)
        try:
            evidence = await (self._gone(op) if by_ending else self._asleep_or_gone(op))
        except BaseException as error:
            self._fail(_E.DEATH_NOTICED if asleep else _E.DRAIN_FAILED, error)
            if isinstance(error, PermanentError | TransientError):
                raise UnconfirmedError(f"{self.engine_id} was not released: {error}") from error
            raise
        if not asleep:
            self._advance(_E.RELEASE_CONFIRMED)
        return evidence

    async def stop(self, op: EngineOperation) -> ReleaseEvidence | None:
        """End every process of the replica and prove it."""
        await self._notice_death()
        if self.state is ReplicaState.DEAD:
            self.error = None  # of the launch that failed; this operation did not
            return await self._free(op)
        self._advance(_E.STOP_STARTED)
        try:
            evidence = await self._gone(op)
        except BaseException as error:
            self._fail(_E.STOP_UNCONFIRMED, error)
            raise
        self._advance(_E.RELEASE_PROVED)
        return evidence

    async def forget(self, op: EngineOperation) -> None:
        """A person's word that nothing of the replica is left, where no proof could be had.

        Refused while a host still shows a process of it: then the word is wrong.
        """
        with contextlib.suppress(RelaxError):  # the word is about what cannot be asked
            await self.recall()
        if self.state is ReplicaState.DEAD:
            await self.nodes.forget(op.fence, ends_grant=op.ends_grant)
            return
        if self.state is not ReplicaState.FAILED:
            raise PermanentError(
                f"Engine {self.engine_id} is {self.state}: only a failed one is forgotten.",
                cure="Offload or stop it; that proves its release.",
            )
        await self.nodes.forget(op.fence, ends_grant=op.ends_grant)
        self._forget_incarnation()
        self._advance(_E.RESOLVED_BY_OPERATOR)

    async def _asleep_or_gone(self, op: EngineOperation) -> ReleaseEvidence | None:
        """A server that dies while it is asked to let go is released by proof instead."""
        try:
            return await self._asleep(op)
        except UnconfirmedError:
            engine = self.engine
            if engine is None:
                raise
            if not await engine.exits_within(_DYING_SECONDS) and not await self.nodes.lost():
                raise
            return await self._gone(op)

    async def _asleep(self, op: EngineOperation) -> ReleaseEvidence | None:
        if self.engine is None:
            return await self._free(op)
        before = await self.nodes.memory()
        await drain(self._control, op.fence, self.spec.drain_timeout)
        await self.resident.release(self._control, op.fence, self.spec.drain_timeout)
        after = {use.node: use.in_use for use in await self.nodes.memory()}
        uses = [use.model_copy(update={"after": after[use.node]}) for use in before]
        evidence = self._evidence(op.fence, uses, self.spec.residual_memory)
        if doubts := memory_doubts(evidence):
            raise UnconfirmedError(
                f"Engine {self.engine_id} acknowledged its release and {'; '.join(doubts)}.",
                cure="It is ended instead, which frees the device.",
            )
        return evidence

    async def _gone(self, op: EngineOperation) -> ReleaseEvidence | None:
        return await self._free(op, await self._end(op.fence, ends_grant=op.ends_grant))

    async def _free(
        self, op: EngineOperation, uses: Sequence[NodeUse] = ()
    ) -> ReleaseEvidence | None:
        """Evidence of a replica of which no process is left; none while its memory is not back.

        Where its grant ends with ``op`` somebody else is granted the devices next, so that is
        waited for. Where the grant goes on, its own next launch waits. After it ended here others
        may have them, and what is in use there says nothing of this replica.

        Raises:
            UnconfirmedError: its memory did not come back.
        """
        if self.nodes.owing and not self.files.fence_memory().ended:
            if not op.ends_grant:
                return None
            now = await self.nodes.given_back(_GIVE_BACK_SECONDS)
            uses = [use.model_copy(update={"after": now.get(use.node, use.after)}) for use in uses]
        return self._evidence(op.fence, uses, self.spec.residual_memory, gone=True)

    async def settle(self, prefix: str, timeout: float, current: Callable[[], FenceToken]) -> int:
        """Abort requests whose id begins with ``prefix``; their number, once they are gone.

        Nothing runs in an engine that is not there or asleep. A server that is gone took its
        requests along.
        """
        engine = self.engine
        if engine is None or self.state is ReplicaState.SLEEPING or engine.ended():
            return 0
        return await settle(engine.control, prefix, timeout, current)

    async def in_flight(self) -> int:
        """Requests that its fence has admitted and not yet answered."""
        engine = self.engine
        if engine is None or self.state is ReplicaState.SLEEPING or engine.ended():
            return 0
        return (await engine.control.status())["inflight"]

    @property
    def _control(self) -> EngineControl:
        if self.engine is None:
            raise PermanentError(f"Engine {self.engine_id} is {self.state}: it has no process.")
        return self.engine.control

    def _advance(self, event: ReplicaEvent) -> None:
        self.state = REPLICA.advance(self.state, event)

    def _fail(self, event: ReplicaEvent, error: BaseException) -> None:
        """The event, where its state still stands; a launch that failed has said so itself."""
        if REPLICA.allows(self.state, event):
            self._advance(event)
        self.error = str(error) or type(error).__name__

    def _found(self, left: str | None) -> None:
        """An earlier actor of the head left something that only a release proof ends."""
        self.state = REPLICA.advance(REPLICA.initial, _E.DEATH_NOTICED)
        self.error = left

    async def recall(self) -> None:
        """Before this actor calls the replica dead for the first time, its followers are asked."""
        if self.state is not ReplicaState.DEAD:
            return
        left = await self.nodes.recollect()
        if left is not None and self.state is ReplicaState.DEAD:
            self._found(left)

    async def _notice_death(self) -> None:
        await self.recall()
        if self.engine is None or self.state is ReplicaState.FAILED:
            return
        if lost := await self.nodes.lost():
            self.error = lost
            self._advance(_E.DEATH_NOTICED)

    async def _launch(self, op: EngineOperation) -> bool:
        """Start a server where none runs or one failed; whether it did."""
        await self._notice_death()
        if self.state is ReplicaState.FAILED:
            self._advance(_E.STOP_STARTED)
            try:
                await self._end(op.fence)
            except BaseException:
                self._advance(_E.STOP_UNCONFIRMED)
                raise
            self._advance(_E.RELEASE_PROVED)
        if self.engine is not None:
            return False
        weights = op.weights
        folder = weights_folder(weights) if weights is not None else Path(op.group.model_path)
        version = weights.version if weights is not None else None
        self.spec, self.error = op.group, None
        if self.state is ReplicaState.SLEEPING:
            self._advance(_E.ONLOAD_STARTED)
        else:
            self.state = REPLICA.initial
        try:
            await self.nodes.start(
                self.spec, token=op.fence, model_path=folder, weight_version=version
            )
        except BaseException:
            starting = self.state is ReplicaState.STARTING
            self._advance(_E.LAUNCH_FAILED if starting else _E.ONLOAD_FAILED)
            if not self.nodes.held:
                self._advance(_E.RELEASE_PROVED)
            raise
        if self.state is ReplicaState.STARTING:
            self._advance(_E.LAUNCHED)
        self.resident.begin(folder, weights)
        return True

    async def _end(self, token: FenceToken, *, ends_grant: bool = False) -> tuple[NodeUse, ...]:
        """End the processes and forget the incarnation; raises unless it is proved gone."""
        if self.engine is not None and not self.engine.exited():
            # Callers get an answer that says aborted rather than a broken connection.
            await close_before_end(self.engine.control, token)
        uses = await self.nodes.end(token, ends_grant=ends_grant)
        self._forget_incarnation()
        return uses

    def _forget_incarnation(self) -> None:
        self.error = None
        self.resident.forget()

    async def check_weights(self) -> None:
        await self.resident.check_weights(self._control, self.spec)

    def _evidence(
        self,
        token: FenceToken,
        uses: Sequence[NodeUse] = (),
        beyond: int = 0,
        *,
        gone: bool = False,
    ) -> ReleaseEvidence:
        return release_evidence(
            self.engine_id, token, at=time.time(), gone=gone, uses=uses, beyond=beyond
        )
