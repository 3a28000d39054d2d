"""One replica on its host: its state, and the operations that change it.

Lives in the engine's actor; knows nothing of Ray. Every operation is carried out under a fence
token by one caller at a time, and leaves the replica in a state of ``relax_infer.machines.REPLICA``
that says whether it still counts as a holder of its GPUs.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from relax_infer.contracts.engines import (
    RESIDENT_TAGS,
    EngineGroupSpec,
    EngineOperation,
    ReleaseEvidence,
    ReplicaReport,
)
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines.canary import compare_canaries, take_canary
from relax_infer.engines.control import EngineControl
from relax_infer.engines.digest import checkpoint_dtype, expected_digest
from relax_infer.engines.drain import close_before_end, confirm_drained, drain, settle
from relax_infer.engines.evidence import release_evidence
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.memory import GONE_SLACK, SLEEPING_CONTEXTS, memory_in_use
from relax_infer.engines.process import EngineProcess, end_engine, local_path, start_engine
from relax_infer.engines.pulse import Pulse
from relax_infer.engines.release import find_processes
from relax_infer.machines import REPLICA, ReplicaEvent, ReplicaState

_E = ReplicaEvent
_DYING_SECONDS = 2.0
"""Between a killed server's closed socket and the end of its process."""
_AWAKE = (ReplicaState.READY, ReplicaState.ONLOADING)


class EngineReplica:
    """State and operations of one replica. Not for two callers at once."""

    def __init__(self, spec: EngineGroupSpec, replica: int, pool: str = "") -> None:
        self.spec, self.replica = spec, replica
        self.files = HolderFiles(spec, replica, pool)
        self.engine: EngineProcess | None = None
        self.version: int | None = None
        """Version of the resident weights; None before any, and for weights without versions."""
        self.digest: str | None = None
        self.error: str | None = None
        self._folder: Path | None = None
        self._loaded = False
        """Whether weights were loaded since the last canary that serves as the reference."""
        self._resident: set[str] = set()
        self._pulse = Pulse()
        self.state = ReplicaState.DEAD
        if (left := self.files.holder()) is not None:
            # An actor before this one started it. Its answers cannot be trusted; only a release
            # proof leads on from here.
            self.engine = EngineProcess(left, None)
            self.state = REPLICA.advance(REPLICA.initial, _E.DEATH_NOTICED)
            self.error = (
                f"incarnation {left.processes.incarnation} was started by an actor that is gone"
            )

    @property
    def engine_id(self) -> str:
        return self.spec.engine_id(self.replica)

    @property
    def gpus(self) -> tuple[int, ...]:
        each = self.spec.gpus_per_replica
        return tuple(b.gpu_id for b in self.spec.bundles[self.replica * each :][:each])

    async def launch(self, op: EngineOperation) -> None:
        """Start the server, gate closed, weights resident and checked. Nothing if it runs."""
        try:
            if await self._launch(op):
                await self._check_weights()
        except BaseException as error:
            self._fail(_E.ONLOAD_FAILED, error)
            raise

    async def onload(self, op: EngineOperation) -> None:
        """Everything resident, weights as asked, and, unless told otherwise, admission open."""
        token = op.fence
        try:
            await self._launch(op)
            if self.state is ReplicaState.READY:
                if self._current(op.weights) and op.open_admission:
                    await self._control.open(token)
                    self._pulse.begin()
                    return
                self._advance(_E.WEIGHTS_UPDATE_STARTED)
                await drain(self._control, token, self.spec.drain_timeout)
            elif self.state is ReplicaState.SLEEPING:
                self._advance(_E.ONLOAD_STARTED)
            await self._resume(("weights",), token)
            if op.weights is not None and not self._current(op.weights):
                await self._load(op.weights, token)
            await self._resume(RESIDENT_TAGS, token)
            await self._control.continue_generation(token)
            await self._check_weights()
            await self._check_canary()
            await self._control.close(token)
            await confirm_drained(self._control, self.spec.drain_timeout)
            if op.open_admission:
                await self._control.open(token)
                self._advance(_E.OPENED)
                self._pulse.begin()
        except BaseException as error:
            self._fail(_E.ONLOAD_FAILED, error)
            raise

    async def load_weights(self, op: EngineOperation) -> None:
        """Load ``op.weights`` behind a closed gate, read them back, open as asked."""
        self._notice_death()
        if op.weights is None:
            raise PermanentError(f"Operation {op.operation_id} names no weights to load.")
        if self.state not in _AWAKE:
            raise PermanentError(
                f"Engine {self.engine_id} is {self.state}: weights are loaded into an engine that"
                " is awake.",
                cure="Onload it under a grant first.",
            )
        await self.onload(op)

    async def offload(self, op: EngineOperation) -> ReleaseEvidence:
        """Let go of the GPUs and say on what evidence; what cannot be told raises.

        With kind ``restart`` it lets go by ending, and so does a replica that failed, since its
        answers prove nothing. Asked again, it looks again.
        """
        self._notice_death()
        if self.state is ReplicaState.DEAD:
            return await self._evidence(op.fence, None, None, gone=True)
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

    async def stop(self, op: EngineOperation) -> ReleaseEvidence:
        """End every process of the replica and prove it."""
        self._notice_death()
        if self.state is ReplicaState.DEAD:
            return await self._evidence(op.fence, None, None, gone=True)
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

        Refused while this host still shows a process of it: then the word is wrong.
        """
        if self.state is ReplicaState.DEAD:
            return
        if self.state is not ReplicaState.FAILED:
            raise PermanentError(
                f"Engine {self.engine_id} is {self.state}: only a failed one is forgotten.",
                cure="Offload or stop it; that proves its release.",
            )
        if self.engine is not None:
            found = await asyncio.to_thread(find_processes, self.engine.holder.processes)
            if found:
                pids = ", ".join(str(row.stamp.pid) for row in found)
                raise PermanentError(
                    f"Engine {self.engine_id} is not gone: processes {pids} of it live on this"
                    " host.",
                    cure="End them, then resolve again.",
                )
        self.files.remove_holder()
        self._forget_incarnation()
        self._advance(_E.RESOLVED_BY_OPERATOR)

    async def _asleep_or_gone(self, op: EngineOperation) -> ReleaseEvidence:
        """A server that dies while it is asked to let go is released by proof instead."""
        try:
            return await self._asleep(op)
        except UnconfirmedError:
            if self.engine is None or not await self.engine.exits_within(_DYING_SECONDS):
                raise
            return await self._gone(op)

    async def _asleep(self, op: EngineOperation) -> ReleaseEvidence:
        if self.engine is None:
            return await self._evidence(op.fence, None, None, gone=True)
        before = await self._memory()
        await drain(self._control, op.fence, self.spec.drain_timeout)
        tags = [tag for tag in RESIDENT_TAGS if tag in self._resident]
        if tags:
            await self._control.release(tags, op.fence, self.spec.drain_timeout)
            self._resident.clear()
        return await self._evidence(op.fence, before, self._allowed(SLEEPING_CONTEXTS))

    async def _gone(self, op: EngineOperation) -> ReleaseEvidence:
        before, allowed = await self._memory(), self._allowed(GONE_SLACK)
        await self._end(op.fence)
        return await self._evidence(op.fence, before, allowed, gone=True)

    async def settle(self, prefix: str, timeout: float) -> int:
        """Abort requests whose id begins with ``prefix``; their number, once they are gone.

        Nothing runs in an engine that is not there or asleep. A server that is gone took its
        requests along.
        """
        engine = self.engine
        if engine is None or self.state is ReplicaState.SLEEPING or engine.ended():
            return 0
        return await settle(engine.control, prefix, timeout)

    async def report(self) -> ReplicaReport:
        """What is known now; asks the engine and changes nothing. Safe during an operation."""
        state, error, fence, engine = self.state, self.error, self.files.fence(), self.engine
        if engine is not None and state in (*_AWAKE, ReplicaState.SLEEPING):
            fence, error = await self._look(engine, state)
            if error is not None and state is self.state:
                state = ReplicaState.FAILED
        return ReplicaReport(
            replica=self.replica,
            engine_id=self.engine_id,
            state=state,
            base_url=engine.holder.base_url if engine and state is ReplicaState.READY else None,
            incarnation=engine.holder.processes.incarnation if engine else None,
            weight_version=self.version,
            weights_digest=self.digest,
            fence=fence,
            error=error,
        )

    async def health(self) -> ReplicaReport:
        """A report in which a READY replica that lost a process, or that has said nothing for
        ``spec.health_timeout`` seconds, is FAILED. Others are not judged. Changes nothing."""
        engine = self.engine
        if engine is None or self.state is not ReplicaState.READY:
            return await self.report()
        lost = await self._lost(engine)
        if self.state is not ReplicaState.READY or self.engine is not engine:
            return await self.report()
        return ReplicaReport(
            replica=self.replica,
            engine_id=self.engine_id,
            state=ReplicaState.FAILED if lost else self.state,
            base_url=None if lost else engine.holder.base_url,
            incarnation=engine.holder.processes.incarnation,
            weight_version=self.version,
            weights_digest=self.digest,
            fence=self.files.fence(),
            error=lost,
        )

    async def _lost(self, engine: EngineProcess) -> str | None:
        if engine.exited():
            return _exit_of(engine)
        if gone := engine.missing():
            return f"its process {gone[0]} is gone"
        silent = await self._pulse.silence(engine)
        if silent > self.spec.health_timeout:
            return f"it has given no sign of life for {silent:.0f} s"
        return None

    async def read_weights(self) -> ReplicaReport:
        """A report whose version and digest were read from the engine just now.

        FAILED if they are not what was loaded. An engine without resident weights has none.
        """
        report = await self.report()
        if self.state not in _AWAKE or report.error is not None or "weights" not in self._resident:
            return report.model_copy(update={"weight_version": None, "weights_digest": None})
        try:
            await self._check_weights()
        except (UnconfirmedError, PermanentError) as error:
            return report.model_copy(update={"state": ReplicaState.FAILED, "error": str(error)})
        return report.model_copy(update={"weights_digest": self.digest})

    async def _look(
        self, engine: EngineProcess, state: ReplicaState
    ) -> tuple[FenceToken | None, str | None]:
        """The token that the fence has seen, and what contradicts ``state``."""
        if engine.exited():
            return self.files.fence(), _exit_of(engine)
        try:
            status = await engine.control.status()
        except (UnconfirmedError, PermanentError) as unanswered:
            return self.files.fence(), str(unanswered)
        token = FenceToken.model_validate(status["fence"])
        if status["ready"] == (state is ReplicaState.READY):
            return token, None
        return token, f"it is {state} but its gate is {'open' if status['ready'] else 'shut'}"

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

    def _notice_death(self) -> None:
        engine = self.engine
        if engine is not None and engine.exited() and self.state is not ReplicaState.FAILED:
            self.error = _exit_of(engine)
            self._advance(_E.DEATH_NOTICED)

    def _current(self, weights: WeightsRef | None) -> bool:
        return weights is None or weights.version == self.version

    async def _launch(self, op: EngineOperation) -> bool:
        """Start a server where none runs or one failed; whether it did."""
        self._notice_death()
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
        self.spec, self.error = op.group, None
        if self.state is ReplicaState.SLEEPING:
            self._advance(_E.ONLOAD_STARTED)
        else:
            self.state = REPLICA.initial
        weights = op.weights
        folder = _folder(weights) if weights is not None else Path(self.spec.model_path)
        version = weights.version if weights is not None else None
        try:
            self.engine = await start_engine(
                self.spec,
                self.replica,
                self.files,
                token=op.fence,
                model_path=folder,
                weight_version=version,
            )
        except BaseException:
            starting = self.state is ReplicaState.STARTING
            self._advance(_E.LAUNCH_FAILED if starting else _E.ONLOAD_FAILED)
            if (left := self.files.holder()) is None:
                self._advance(_E.RELEASE_PROVED)
            else:
                self.engine = EngineProcess(left, None)
            raise
        if self.state is ReplicaState.STARTING:
            self._advance(_E.LAUNCHED)
        self._resident, self._folder, self.version = set(RESIDENT_TAGS), folder, version
        self._loaded = True
        return True

    async def _end(self, token: FenceToken) -> None:
        """End the processes and forget the incarnation; raises unless it is proved gone."""
        if self.engine is not None:
            if not self.engine.exited():
                # Callers get an answer that says aborted rather than a broken connection.
                await close_before_end(self.engine.control, token)
            await end_engine(self.engine, self.spec, self.files)
        self._forget_incarnation()

    def _forget_incarnation(self) -> None:
        self.engine = self.version = self.digest = self._folder = self.error = None
        self._resident.clear()
        self._loaded = False

    async def _resume(self, tags: Sequence[str], token: FenceToken) -> None:
        # A resume without a release kills the server.
        missing = [tag for tag in tags if tag not in self._resident]
        if missing:
            await self._control.resume(missing, token, self.spec.drain_timeout)
            self._resident.update(missing)

    async def _load(self, weights: WeightsRef, token: FenceToken) -> None:
        folder = _folder(weights)
        await self._control.load(folder, weights.version, token, self.spec.launch_timeout)
        self._folder, self.version, self._loaded = folder, weights.version, True

    async def _check_canary(self) -> None:
        """A prefill must come out as it did when these weights were loaded.

        The first one after a load becomes the reference; one of the same weights in an earlier
        incarnation is compared with it.
        """
        assert self.digest is not None
        now = await take_canary(self._control, self.digest, self.spec.drain_timeout)
        if (known := self.files.canary()) is not None:
            compare_canaries(known, now)
        if self._loaded:
            self.files.write_canary(now)
            self._loaded = False

    async def _check_weights(self) -> None:
        """Read version and digest back and compare them with what they must be."""
        version = await self._control.weight_version()
        if version != self.version:
            raise PermanentError(
                f"Engine {self.engine_id} says weight version {version}; {self.version} was loaded"
                f" from {self._folder}."
            )
        digest = await self._control.weights_digest(self.spec.launch_timeout)
        expected = await asyncio.to_thread(self._expected_digest)
        if expected is not None and digest != expected:
            raise PermanentError(
                f"Engine {self.engine_id} holds weights of digest {digest} as version {version};"
                f" the files in {self._folder} make {expected}.",
                cure="The load was not what it seemed: do not sample from this engine.",
            )
        self.digest = digest

    def _expected_digest(self) -> str | None:
        spec, folder = self.spec, self._folder
        if spec.device != "cpu" or spec.gpus_per_replica != 1 or folder is None:
            return None
        dtype = spec.server_args.get("dtype") or checkpoint_dtype(Path(spec.model_path))
        return expected_digest(folder, str(dtype))

    async def _memory(self) -> int | None:
        return await memory_in_use(self.gpus) if self.spec.device == "cuda" else None

    def _allowed(self, beyond: int) -> int | None:
        before_launch = self.engine.holder.memory_before if self.engine else None
        return None if before_launch is None else before_launch + beyond * len(self.gpus)

    async def _evidence(
        self, token: FenceToken, before: int | None, allowed: int | None, *, gone: bool = False
    ) -> ReleaseEvidence:
        return release_evidence(
            self.engine_id,
            token,
            at=time.time(),
            gone=gone,
            before=before,
            after=await self._memory() if allowed is not None else None,
            allowed=allowed,
        )


def _folder(weights: WeightsRef) -> Path:
    folder = local_path(weights.uri)
    if folder is None:
        raise PermanentError(
            f"Weights version {weights.version} are at {weights.uri}, which is no folder of this"
            " host.",
            cure="Engines load from a folder: set staging.url to a path that every host mounts.",
        )
    return folder


def _exit_of(engine: EngineProcess) -> str:
    return f"its server exited by itself; the end of its log {engine.holder.log}:\n{engine.tail()}"
