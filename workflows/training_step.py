"""TrainingStep: one step of a run, from prompts to new weights in the engines."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

from relax_infer.contracts.batch import (
    EvaluateRequest,
    FinaliseRequest,
    FinaliseResult,
    PhaseRequest,
    PhaseResult,
    PublishRequest,
    PublishResult,
    WriteBackRequest,
    WriteBackResult,
)
from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.lease import LeaseAnswer, LeaseMethod, RoleOperation, RoleResult
from relax_infer.contracts.mailbox import Answer
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.contracts.run import (
    Evaluation,
    FrontAddress,
    PhaseRetry,
    PhaseTime,
    RecordRequest,
    StepInput,
    StepRecord,
    StepResult,
    StepStatus,
    TurnAnswer,
    TurnRequest,
    WeightSyncInput,
    WeightSyncResult,
    batch_of,
)
from relax_infer.contracts.training import TrainRequest
from relax_infer.machines import STEP, StepEvent, StepPhase
from workflows._calls import (
    CLEAR_PARTITION,
    ENSURE_FRONT,
    EVALUATE_POLICY,
    FINALISE_BATCH,
    GENERATE_GROUPS,
    JUDGE_SAMPLES,
    PUBLISH_BATCH,
    TEACH_SAMPLES,
    TRAIN_STEP,
    WRITE_BACK_SCORES,
    WRITE_STEP_RECORD,
    Call,
)
from workflows._failures import PERMANENT, fail, kind_of, text_of
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._turns import Turn
from workflows._versions import PINNED
from workflows._visible import attributes, show_details, show_reward, show_state, show_weights

LONGEST_PAUSE = 20.0
BLOCKED_PAUSE = 5.0
I = TypeVar("I", bound=BaseModel)  # noqa: E741
O = TypeVar("O", bound=BaseModel)  # noqa: E741


@workflow.defn(name="TrainingStep", versioning_behavior=PINNED)
class TrainingStep:
    """prepare → generate → offload → judge → teach → write back → publish → finalise → commit →
    train → sync weights → evaluate. Step 0 syncs the first weights and evaluates.

    A role lets go of its GPUs as soon as another that shares them needs them: after its work, or
    before the commit if it shares them with the trainer alone, or never if with nobody.
    """

    @workflow.init
    def __init__(self, start: StepInput) -> None:
        self._start = start
        self._plan = start.plan
        self._batch = batch_of(start.step, start.attempt)
        self._mail = Mailbox()
        self._lease = LeaseClient(self._mail, start.plan.run.run)
        self._phase: StepPhase = STEP.initial
        self._began = self._entered = workflow.time()
        self._phases: list[PhaseTime] = []
        self._attempts: dict[str, int] = {}
        self._retries: list[PhaseRetry] = []
        self._weights = start.weights
        self._holding: list[str] = []
        """Roles to let go, in the order in which they were taken."""
        self._in_batch = False
        self._error: str | None = None
        self._front: FrontAddress | None = None
        self._result = StepResult(step=start.step, weights=start.weights)
        self._doing = ""
        self._scored: StagedRef | None = None
        self._published: PublishResult | None = None

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.query
    def status(self) -> StepStatus:
        return StepStatus(
            step=self._start.step,
            phase=self._phase,
            doing=self._doing,
            attempts=self._attempts,
            error=self._error,
        )

    @workflow.run
    async def run(self, start: StepInput) -> StepResult:
        self._show("brings up router and gateway")
        try:
            self._front = await ENSURE_FRONT(self._plan.run, summary="router and gateway")
            if start.step > 0:
                await self._batch_from_prompts_to_commit()
                await self._train()
            await self._publish_weights()
            self._enter(StepEvent.COMPLETED, "is done")
        except (FailureError, asyncio.CancelledError) as error:
            await self._give_up(error)
            raise fail(kind_of(error), f"step {start.step}: {self._error}") from error
        return await self._keep_record()

    # --- the batch

    async def _batch_from_prompts_to_commit(self) -> None:
        """Everything that must be true before the trainer may read."""
        self._enter(StepEvent.GENERATION_STARTED, "waits for the policy engines")
        generated = await self._generate()
        judged, taught = await self._scores(generated)
        self._enter(StepEvent.SCORES_IN, "validates the scores and joins them to the samples")
        scored = await self._write_back(generated, judged, taught)
        self._enter(StepEvent.WRITTEN_BACK, "publishes the batch to TransferQueue")
        self._scored = scored.staged
        published = await PUBLISH_BATCH(self._published_request(), summary="publish")
        self._published = published
        self._enter(StepEvent.PUBLISHED, "writes metrics and the sample export")
        await self._finalise(scored, published)
        for role in tuple(self._holding):
            await self._hand_back(role)
        await self._lease.take("commit_batch", batch=self._batch)
        self._in_batch = False
        await self._give_back_turn("generate")
        self._enter(StepEvent.FINALIZED, "has committed the batch")

    async def _generate(self) -> PhaseResult:
        await self._take_turn("generate")
        self._in_batch = True
        await self._take("begin_batch", "rollout", weights=self._weights)
        self._show("generates")
        generated = await self._run_phase(
            GENERATE_GROUPS, lambda: self._phase_request("rollout"), "generate", role="rollout"
        )
        self._enter(StepEvent.GENERATED, "waits for the proof that the policy engines let go")
        await self._done_with("rollout")
        return generated

    async def _scores(
        self, generated: PhaseResult
    ) -> tuple[PhaseResult | None, PhaseResult | None]:
        """The GenRM's and the Teacher's: at once where they share no GPU, else in turn."""
        plan = self._plan
        both = plan.judged_by_genrm and plan.distilled
        apart = "genrm" not in plan.roles or "teacher" not in plan.sharing("genrm")
        if both and apart and workflow.patched("scored-at-once"):
            self._enter(StepEvent.JUDGING_STARTED, "waits for the GenRM and the Teacher")
            judged, taught = await _all_ended(self._judge(generated), self._teach(generated))
            self._enter(StepEvent.TEACHING_STARTED, "has its scores")
            return judged, taught
        judged = taught = None
        if plan.judged_by_genrm:
            self._enter(StepEvent.JUDGING_STARTED, "waits for the GenRM")
            judged = await self._judge(generated)
        if plan.distilled:
            self._enter(StepEvent.TEACHING_STARTED, "waits for the Teacher")
            taught = await self._teach(generated)
        return judged, taught

    async def _judge(self, generated: PhaseResult) -> PhaseResult:
        return await self._score("genrm", JUDGE_SAMPLES, generated)

    async def _teach(self, generated: PhaseResult) -> PhaseResult:
        return await self._score("teacher", TEACH_SAMPLES, generated)

    async def _score(
        self, role: str, call: Call[PhaseRequest, PhaseResult], generated: PhaseResult
    ) -> PhaseResult:
        """Under the lease, unless somebody else serves the role: then it has no GPUs of ours."""
        ours = role in self._plan.roles
        if ours:
            await self._take("activate", role)
        self._show(f"has the {role} score {generated.staged.rows} samples")
        scored = await self._run_phase(
            call,
            lambda: self._phase_request(role, generated),
            f"score with {role}",
            role=role if ours else None,
        )
        if ours:
            await self._done_with(role)
        return scored

    async def _write_back(
        self, generated: PhaseResult, judged: PhaseResult | None, taught: PhaseResult | None
    ) -> WriteBackResult:
        return await WRITE_BACK_SCORES(
            WriteBackRequest(
                run=self._plan.run,
                step=self._start.step,
                generated=generated.staged,
                judged=judged.staged if judged else None,
                taught=taught.staged if taught else None,
            ),
            summary="validate and write back",
        )

    async def _finalise(self, scored: WriteBackResult, published: PublishResult) -> None:
        """Metrics and export from the scored rows; a failure here takes the partition back."""
        try:
            finalised: FinaliseResult = await FINALISE_BATCH(
                FinaliseRequest(
                    run=self._plan.run,
                    step=self._start.step,
                    scored=scored.staged,
                    published=published,
                    dropped_groups=scored.dropped_groups,
                    drop_reasons=scored.drop_reasons,
                ),
                summary="metrics and export",
            )
        except ActivityError as error:
            await self._take_partition_back(error)
            raise
        self._result = self._result.model_copy(update={"batch": finalised.metrics})
        show_reward(finalised.metrics.reward_mean)

    async def _take_partition_back(self, cause: ActivityError) -> None:
        """A partition that cannot be taken back is never committed, and the next attempt replaces
        it; what led to it stays the cause."""
        try:
            await CLEAR_PARTITION(self._published_request(), summary="take the partition back")
        except ActivityError as left:
            told = f"{text_of(cause)}; its partition could not be taken back: {text_of(left)}"
            raise fail(kind_of(cause), told) from cause

    # --- training and weights

    async def _train(self) -> None:
        """One update, exactly once: the trainer's ledger answers a repeated request."""
        self._enter(StepEvent.TRAINING_STARTED, "waits for the trainer")
        await self._take_turn("train")
        granted = await self._take("acquire", "trainer", purpose="train")
        assert granted.fence is not None
        assert self._published is not None
        request = TrainRequest(
            trainer=self._plan.trainer,
            fence=granted.fence,
            step=self._start.step,
            partition=self._published.partition,
            keys=self._published.keys,
            digest=self._published.digest,
        )
        self._show(f"trains on {request.keys} samples")
        trained = await self._run_phase(TRAIN_STEP, lambda: request, "train")
        await self._done_with("trainer")
        breach = self._plan.logprob_bound.breach(trained.logprob_gap, trained.logprob_gap_max)
        if breach is not None:
            workflow.logger.warning("step %d: %s", self._start.step, breach)
        self._result = self._result.model_copy(
            update={
                "training": trained,
                "weights": trained.weights,
                "alarms": (breach,) if breach else (),
            }
        )

    async def _publish_weights(self) -> None:
        """To the policy engines; what they answer with is evaluated before anything else is."""
        weights = self._result.weights
        if self._start.step > 0:
            await self._take_turn("sync")
        await self._sync_weights(weights)
        if self._start.step > 0:
            await CLEAR_PARTITION(self._published_request(), summary="clear the partition")
        if self._start.evaluate:
            await self._evaluate()
        if self._start.step > 0:
            await self._give_back_turn("train")
            await self._give_back_turn("sync", weights)

    async def _sync_weights(self, weights: WeightsRef) -> None:
        self._enter(
            StepEvent.WEIGHT_SYNC_STARTED,
            f"brings weights {weights.version} to the policy engines",
        )
        run = self._plan.run
        synced: WeightSyncResult = await workflow.execute_child_workflow(
            "WeightSync",
            WeightSyncInput(run=run, weights=weights, resident=self._resident("rollout")),
            id=f"{run.run}.weights-{weights.version}",
            result_type=WeightSyncResult,
            search_attributes=attributes(run=run.run, step=self._start.step),
            static_summary=f"weights {weights.version} of {run.run}",
        )
        show_weights(synced.version)

    async def _evaluate(self) -> None:
        self._enter(StepEvent.EVALUATION_STARTED, "waits for the policy engines to evaluate")
        weights = self._result.weights
        await self._take("acquire", "rollout", purpose="eval", weights=weights)
        self._show("answers the held-out problems")
        evaluation: Evaluation = await self._run_phase(
            EVALUATE_POLICY,
            lambda: EvaluateRequest(
                run=self._plan.run,
                step=self._start.step,
                weight_version=weights.version,
                front=self._fronted,
                groups=self._groups_of("rollout"),
            ),
            "evaluate",
            role="rollout",
        )
        await self._done_with("rollout")
        self._result = self._result.model_copy(update={"evaluation": evaluation})

    # --- pieces

    async def _take(
        self,
        method: LeaseMethod,
        role: str,
        *,
        purpose: str | None = None,
        weights: WeightsRef | None = None,
    ) -> LeaseAnswer:
        """Get the GPUs for ``role``; the policy's ``weights`` are read back from each engine."""
        if role not in self._holding:
            self._holding.append(role)
        batch = self._batch if method != "acquire" or purpose == "train" else None
        granted = await self._lease.take(
            method,
            None if method == "begin_batch" else role,
            batch=batch,
            purpose=purpose,
            weights=weights,
        )
        if weights is not None and granted.weight_version != weights.version:
            raise fail(
                PERMANENT,
                f"the {role} engines hold weights {granted.weight_version}, not {weights.version}",
            )
        return granted

    async def _done_with(self, role: str) -> None:
        """Let go of the role's GPUs if another may want them before the batch is committed."""
        sharing = self._plan.sharing(role)
        if not sharing:
            self._holding.remove(role)
        elif not self._in_batch or sharing != ("trainer",):
            await self._hand_back(role)

    async def _hand_back(self, role: str) -> None:
        await self._let_go(role)
        if role == "rollout" and self._in_batch:
            await self._lease.take("acknowledge_rollout_offloaded", batch=self._batch)

    async def _let_go(self, role: str) -> None:
        await self._lease.release(role, batch=self._batch if self._in_batch else None)
        self._holding.remove(role)

    def _resident(self, role: str) -> bool:
        return not self._plan.sharing(role)

    # --- turns, where several steps of the run are open at once

    async def _take_turn(self, turn: Turn) -> None:
        if self._plan.max_staleness == 0:
            return
        given = await self._ask_run("take_turn", turn)
        if turn == "generate":
            self._weights = given.weights

    async def _give_back_turn(self, turn: Turn, weights: WeightsRef | None = None) -> None:
        if self._plan.max_staleness > 0:
            await self._ask_run("give_back_turn", turn, weights)

    async def _ask_run(
        self, method: str, turn: Turn, weights: WeightsRef | None = None
    ) -> TurnAnswer:
        return await self._mail.ask(
            self._plan.run.run,
            method,
            TurnRequest(turn=turn, step=self._start.step, weights=weights),
            TurnAnswer,
            operation_id=self._lease.operation_id(method, turn),
        )

    async def _run_phase(
        self, call: Call[I, O], make: Callable[[], I], summary: str, *, role: str | None = None
    ) -> O:
        """Run a phase; after a transient failure or a lost worker run it again.

        A phase asks only for what no shard holds, so a repeat costs what was in flight. Before it
        the engines of ``role``, router and gateway are brought up again: any may be what failed.
        """
        pause = 0.5
        for attempt in range(1, self._plan.phase_attempts + 1):
            self._attempts[summary] = self._attempts.get(summary, 0) + 1
            began = workflow.time()
            try:
                done = await call(make(), summary=f"{summary}, attempt {attempt}")
                self._recovered(summary)
                return done
            except ActivityError as error:
                self._retries.append(
                    PhaseRetry(
                        phase=self._phase,
                        what=summary,
                        attempt=attempt,
                        began=began,
                        failed=workflow.time(),
                        error=text_of(error),
                    )
                )
                if kind_of(error) == PERMANENT or attempt == self._plan.phase_attempts:
                    raise
                self._show(f"will {summary} again: {text_of(error)}")
                await workflow.sleep(pause)
                pause = min(3 * pause, LONGEST_PAUSE)
                if role is not None:
                    await self._until_ready(role, error)
                self._front = await ENSURE_FRONT(self._plan.run, summary="router and gateway")
        raise AssertionError("unreachable")

    def _recovered(self, what: str) -> None:
        """The failures of this work so far were made good."""
        now = workflow.time()
        self._retries = [
            each.model_copy(update={"recovered": now})
            if each.what == what and each.recovered is None
            else each
            for each in self._retries
        ]

    async def _until_ready(self, role: str, error: ActivityError) -> None:
        """Wait until lost engines of the role are rebuilt, for as long as a person may need."""
        while True:
            state = await self._mail.ask(
                f"{self._plan.run.run}.{role}",
                "ready",
                RoleOperation(method="ready", fence=None),
                RoleResult,
                operation_id=self._lease.operation_id("ready", role),
            )
            if state.state == "READY":
                return
            if state.state != "BLOCKED":
                raise error
            self._show(f"waits for the {role} engines: {state.why}")
            await workflow.sleep(BLOCKED_PAUSE)

    @property
    def _fronted(self) -> FrontAddress:
        assert self._front is not None
        return self._front

    def _groups_of(self, role: str) -> tuple[EngineGroupSpec, ...]:
        return tuple(g for g in self._plan.groups if g.role == role)

    def _phase_request(self, role: str, source: PhaseResult | None = None) -> PhaseRequest:
        return PhaseRequest(
            run=self._plan.run,
            step=self._start.step,
            weight_version=self._weights.version,
            front=self._fronted,
            groups=self._groups_of(role),
            source=source.staged if source else None,
        )

    def _published_request(self) -> PublishRequest:
        assert self._scored is not None
        return PublishRequest(run=self._plan.run, step=self._start.step, scored=self._scored)

    def _enter(self, event: StepEvent, doing: str) -> None:
        """Advance the phase; the one left goes into the record with its time."""
        now = workflow.time()
        self._phases.append(
            PhaseTime(phase=self._phase, started=self._entered, seconds=now - self._entered)
        )
        self._phase = STEP.advance(self._phase, event)
        self._entered = now
        self._show(doing)

    def _show(self, doing: str) -> None:
        self._doing = doing
        show_state(self._phase)
        rows = [("**warning**", alarm) for alarm in self._result.alarms]
        evaluation = self._result.evaluation
        if evaluation is not None:
            told = evaluation.scores or {"accuracy": evaluation.accuracy}
            pinned = f"with weights {evaluation.weight_version}"
            rows += [(name, f"{value:.3f} {pinned}") for name, value in told.items()]
        rows += [(str(p.phase), f"{p.seconds:.2f} s") for p in self._phases]
        show_details(f"Step {self._start.step} {doing}. **{self._phase}**", rows)

    async def _give_up(self, error: BaseException) -> None:
        """Let go of what is held, close the batch's gate with the cause, keep the record."""
        self._error = text_of(error)
        workflow.logger.error("step %d gives up: %s", self._start.step, self._error)
        for role in [r for r in self._holding if not self._resident(r)]:
            await self._in_peace(self._let_go(role))
        if self._in_batch:
            await self._in_peace(
                self._lease.take("fail_batch", batch=self._batch, message=self._error or "unknown")
            )
        self._enter(StepEvent.GAVE_UP, f"gave up: {self._error}")
        await self._in_peace(self._keep_record())

    @staticmethod
    async def _in_peace(work: Awaitable[object]) -> None:
        """Part of giving up: a further failure is logged and must not hide the first."""
        try:
            await work
        except FailureError as error:
            workflow.logger.error("while giving up: %s", text_of(error))

    async def _keep_record(self) -> StepResult:
        result = self._result.model_copy(update={"phases": tuple(self._phases)})
        record = StepRecord(
            run=self._plan.run.run,
            step=self._start.step,
            outcome=self._phase,
            result=result,
            error=self._error,
            retries=tuple(self._retries),
        )
        staged = await WRITE_STEP_RECORD(
            RecordRequest(run=self._plan.run, record=record, since=self._began),
            summary="step record",
        )
        self._result = result.model_copy(update={"record": staged})
        return self._result


async def _all_ended(*work: Awaitable[PhaseResult]) -> list[PhaseResult]:
    """All results; a failure is raised once nothing of the rest is at work any more."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ended if not isinstance(each, BaseException)]
