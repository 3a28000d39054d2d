"""ReplicaRecovery: one failed replica, from the fence to its readmission."""

from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from relax_infer.contracts.engines import EngineOperation, GroupReport, ReplicaReport
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.recovery import RecoveryInput, RecoveryNote, RecoveryResult
from relax_infer.contracts.refs import StagedRef
from relax_infer.machines import RECOVERY, RecoveryEvent, RecoveryState, ReplicaState
from workflows._calls import (
    LAUNCH_ENGINES,
    LOAD_ENGINE_WEIGHTS,
    ONLOAD_ENGINES,
    PROBE_ENGINES,
    STOP_ENGINES,
    Call,
)
from workflows._failures import fail, text_of
from workflows._versions import PINNED
from workflows._visible import show_details, show_state

_E = RecoveryEvent
ASK_AGAIN = 4
"""Times that one operation id is asked for, after a worker or a reply was lost."""
LONGEST_PAUSE = 600.0


@workflow.defn(name="ReplicaRecovery", versioning_behavior=PINNED)
class ReplicaRecovery:
    """fence → stop what lives → prove → rebuild → weights current → canary → READY.

    Nothing is rebuilt without proof that the last incarnation let go. Where none can be had it
    waits in BLOCKED, tries again, and ends as soon as there is one, or a person's word.
    """

    @workflow.init
    def __init__(self, start: RecoveryInput) -> None:
        self._start = start
        self._engine_id = start.group.engine_id(start.replica)
        self._state: RecoveryState = RECOVERY.initial
        self._why = start.cause
        self._word: str | None = None
        self._look_now = False
        self._operations = 0
        self._launches = 0
        self._hopeless = False
        """Whether a launch failed for a reason that another try cannot change."""
        self._evidence: tuple[StagedRef, ...] = ()

    @workflow.signal
    def resolve(self, word: str) -> None:
        """A person says who they are, and why nothing of the replica is left."""
        self._word = word

    @workflow.signal
    def look_again(self) -> None:
        """Somebody asks for another try of the proof, now."""
        self._look_now = True

    @workflow.query
    def state(self) -> RecoveryNote:
        return RecoveryNote(replica=self._start.replica, state=self._state, why=self._why)

    @workflow.run
    async def run(self, start: RecoveryInput) -> RecoveryResult:
        self._show()
        while True:
            if not await self._prove_gone():
                return self._ended(RecoveryState.ABANDONED)
            spent = self._hopeless or self._launches >= start.restarts
            if not start.rebuild or spent:
                await self._move(_E.LEFT_RELEASE_PROVED)
                return self._ended(RecoveryState.ABANDONED, gave_up=start.rebuild)
            await self._back_off()
            if (report := await self._rebuild()) is not None:
                return self._ended(RecoveryState.READMITTED, report)

    # --- stop and prove

    async def _prove_gone(self) -> bool:
        """True: proved at once. False: it was BLOCKED and ended there, by proof or by a word."""
        await self._move(_E.STOP_STARTED)
        pause = 1.0
        while not await self._stopped():
            if self._state is not RecoveryState.BLOCKED:
                await self._move(_E.PROOF_FAILED)
            self._show()
            self._look_now = False
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self._word is not None or self._look_now,
                    timeout=timedelta(seconds=pause),
                )
            pause = min(2 * pause, LONGEST_PAUSE)
            if self._word is not None:
                await self._move(_E.RESOLVED_BY_OPERATOR)
                return False
        if self._state is RecoveryState.BLOCKED:
            await self._move(_E.LEFT_RELEASE_PROVED)
            return False
        return True

    async def _stopped(self) -> bool:
        """Stop what lives on the replica's host; True when a second look finds nothing of it."""
        try:
            report = await self._operate(STOP_ENGINES, "stop")
            stopped = self._need(report, ReplicaState.DEAD)
            if stopped.error is not None:  # no process is left, and its memory is not back
                raise fail("Unconfirmed", stopped.error)
            if self._state is RecoveryState.STOPPING:
                await self._move(_E.STOPPED)
            looked = await PROBE_ENGINES(self._start.group, summary=f"look for {self._engine_id}")
            self._need(looked, ReplicaState.DEAD)
        except (ActivityError, ApplicationError) as error:
            self._why = text_of(error)
            return False
        self._evidence = (report.evidence,) if report.evidence else ()
        return True

    # --- rebuild

    async def _back_off(self) -> None:
        if self._launches:
            await workflow.sleep(self._start.backoff * 2 ** (self._launches - 1))

    async def _rebuild(self) -> ReplicaReport | None:
        """The replica, READY again; None when it did not come to that."""
        await self._move(_E.RELEASE_PROVED)
        self._launches += 1
        failed = _E.REBUILD_FAILED
        try:
            self._need(await self._operate(LAUNCH_ENGINES, "launch"), ReplicaState.ONLOADING)
            await self._move(_E.REBUILT)
            if self._start.weights is not None:
                loaded = await self._operate(LOAD_ENGINE_WEIGHTS, "load weights into", opens=False)
                self._need(loaded, ReplicaState.ONLOADING)
            await self._move(_E.WEIGHTS_CONFIRMED)
            failed = _E.CHECK_FAILED
            report = self._need(await self._operate(ONLOAD_ENGINES, "check"), ReplicaState.READY)
        except (ActivityError, ApplicationError) as error:
            self._why = text_of(error)
            if self._why.startswith(f"{PermanentError.kind}:"):
                self._hopeless = True
            await self._move(failed)
            return None
        await self._move(_E.CHECK_PASSED)
        return report

    async def _operate(
        self, call: Call[EngineOperation, GroupReport], doing: str, *, opens: bool = True
    ) -> GroupReport:
        """One operation on this replica alone; after a lost worker its id is asked for again."""
        self._operations += 1
        request = EngineOperation(
            group=self._start.group,
            operation_id=f"{workflow.info().workflow_id}.{self._operations}",
            fence=self._start.fence,
            weights=self._start.weights,
            open_admission=opens,
            replicas=(self._start.replica,),
            ends_grant=not self._start.rebuild,
        )
        for left in reversed(range(ASK_AGAIN)):
            try:
                return await call(request, summary=f"{doing} {self._engine_id}")
            except ActivityError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    def _need(self, report: GroupReport, state: ReplicaState) -> ReplicaReport:
        mine = next(r for r in report.replicas if r.replica == self._start.replica)
        if mine.state is not state:
            why = mine.error or f"it is {mine.state}"
            raise fail("Unconfirmed", f"{self._engine_id}: {why}" if mine.error is None else why)
        return mine

    # --- told

    async def _move(self, event: RecoveryEvent) -> None:
        """The engine group hears of every state before anything is done in it."""
        self._state = RECOVERY.advance(self._state, event)
        self._show()
        run, group = self._start.run.run, self._start.group
        lifecycle = workflow.get_external_workflow_handle(f"{run}.{group.role}.{group.model}")
        await lifecycle.signal("recovery_changed", self.state())

    def _ended(
        self,
        state: RecoveryState,
        report: ReplicaReport | None = None,
        *,
        gave_up: bool = False,
    ) -> RecoveryResult:
        return RecoveryResult(
            replica=self._start.replica,
            state=state,
            report=report,
            evidence=self._evidence,
            why=f"{self._launches} launches failed: {self._why}" if gave_up else None,
            resolved_by=self._word,
            restarts=self._launches,
        )

    def _show(self) -> None:
        show_state(self._state)
        doing = f"{self._engine_id} is **{self._state}**."
        if self._state is RecoveryState.BLOCKED:
            doing += (
                f" {self._why}\n\nThe GPUs stay fenced. The proof is tried again, at first every"
                " few seconds, later every ten minutes. A person who has seen that nothing is left"
                f" ends this:\n\n`relax-infer resolve {self._start.run.run} --who NAME --why TEXT"
                " --confirm-released`"
            )
        rows = [("cause", self._start.cause), ("now", self._why), ("launches", self._launches)]
        show_details(doing, [(name, str(value)) for name, value in rows])
