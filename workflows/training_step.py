"""TrainingStep: one step of a run, from prompts to new weights in the engines."""

import asyncio
from collections.abc import Awaitable

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
from relax_infer.contracts.mailbox import Answer
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.contracts.run import (
    Evaluation,
    StepInput,
    StepResult,
    StepStatus,
    TurnAnswer,
    TurnRequest,
    WeightSyncInput,
    WeightSyncResult,
    batch_of,
)
from relax_infer.contracts.training import TrainRequest
from relax_infer.machines import StepEvent
from workflows._calls import (
    CLEAR_PARTITION,
    EVALUATE_POLICY,
    FINALISE_BATCH,
    GENERATE_GROUPS,
    JUDGE_SAMPLES,
    PUBLISH_BATCH,
    TEACH_SAMPLES,
    TRAIN_STEP,
    WRITE_BACK_SCORES,
    Call,
)
from workflows._failures import fail, in_peace, kind_of, text_of
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._step_gpus import StepGpus
from workflows._step_journal import StepJournal
from workflows._step_phases import StepPhases
from workflows._turns import Turn
from workflows._versions import PINNED
from workflows._visible import attributes, show_reward, show_weights


@workflow.defn(name="TrainingStep", versioning_behavior=PINNED)
class TrainingStep:
    """prepare → generate → offload → judge → teach → write back → publish → finalise → commit →
    train → sync weights → evaluate. Step 0 syncs the first weights and evaluates.
    """

    @workflow.init
    def __init__(self, start: StepInput) -> None:
        self._start = start
        self._plan = start.plan
        self._mail = Mailbox()
        self._lease = LeaseClient(self._mail, start.plan.run.run)
        self._journal = StepJournal(start)
        self._gpus = StepGpus(self._lease, start.plan, batch_of(start.step, start.attempt))
        self._phases = StepPhases(start.plan, self._mail, self._lease, self._journal)
        self._weights = start.weights
        """With which this step generates."""
        self._scored: StagedRef | None = None
        self._published: PublishResult | None = None

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.query
    def status(self) -> StepStatus:
        return self._journal.status()

    @workflow.run
    async def run(self, start: StepInput) -> StepResult:
        self._journal.show("brings up router and gateway")
        try:
            await self._phases.ensure_front()
            if start.step > 0:
                await self._batch_from_prompts_to_commit()
                await self._train()
            await self._publish_weights()
            self._journal.enter(StepEvent.COMPLETED, "is done")
        except (FailureError, asyncio.CancelledError) as error:
            await self._give_up(error)
            raise fail(kind_of(error), f"step {start.step}: {self._journal.error}") from error
        return await self._journal.keep()

    # --- the batch

    async def _batch_from_prompts_to_commit(self) -> None:
        """Everything that must be true before the trainer may read."""
        self._journal.enter(StepEvent.GENERATION_STARTED, "waits for the policy engines")
        generated = await self._generate()
        judged, taught = await self._scores(generated)
        self._journal.enter(
            StepEvent.SCORES_IN, "validates the scores and joins them to the samples"
        )
        scored = await self._write_back(generated, judged, taught)
        self._journal.enter(StepEvent.WRITTEN_BACK, "publishes the batch to TransferQueue")
        self._scored = scored.staged
        published = await PUBLISH_BATCH(self._published_request(), summary="publish")
        self._published = published
        self._journal.enter(StepEvent.PUBLISHED, "writes metrics and the sample export")
        await self._finalise(scored, published)
        await self._gpus.commit_batch()
        await self._give_back_turn("generate")
        self._journal.enter(StepEvent.FINALIZED, "has committed the batch")

    async def _generate(self) -> PhaseResult:
        await self._take_turn("generate")
        await self._gpus.begin_batch(self._weights)
        self._journal.show("generates")
        generated = await self._phases.run(
            GENERATE_GROUPS, lambda: self._phase_request("rollout"), "generate", role="rollout"
        )
        self._journal.enter(
            StepEvent.GENERATED, "waits for the proof that the policy engines let go"
        )
        await self._gpus.done_with("rollout")
        return generated

    async def _scores(
        self, generated: PhaseResult
    ) -> tuple[PhaseResult | None, PhaseResult | None]:
        """The GenRM's and the Teacher's: at once where they share no GPU, else in turn."""
        plan = self._plan
        both = plan.judged_by_genrm and plan.distilled
        apart = "genrm" not in plan.roles or "teacher" not in plan.sharing("genrm")
        if both and apart:
            self._journal.enter(StepEvent.JUDGING_STARTED, "waits for the GenRM and the Teacher")
            judged, taught = await _all_ended(self._judge(generated), self._teach(generated))
            self._journal.enter(StepEvent.TEACHING_STARTED, "has its scores")
            return judged, taught
        judged = taught = None
        if plan.judged_by_genrm:
            self._journal.enter(StepEvent.JUDGING_STARTED, "waits for the GenRM")
            judged = await self._judge(generated)
        if plan.distilled:
            self._journal.enter(StepEvent.TEACHING_STARTED, "waits for the Teacher")
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
            await self._gpus.take("activate", role)
        self._journal.show(f"has the {role} score {generated.staged.rows} samples")
        scored = await self._phases.run(
            call,
            lambda: self._phase_request(role, generated),
            f"score with {role}",
            role=role if ours else None,
        )
        if ours:
            await self._gpus.done_with(role)
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
        self._journal.note(batch=finalised.metrics)
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
        self._journal.enter(StepEvent.TRAINING_STARTED, "waits for the trainer")
        await self._take_turn("train")
        granted = await self._gpus.take("acquire", "trainer", purpose="train")
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
        self._journal.show(f"trains on {request.keys} samples")
        trained = await self._phases.run(
            TRAIN_STEP, lambda: request, "train", restore=self._put_rows_back
        )
        await self._gpus.done_with("trainer")
        breach = self._plan.logprob_bound.breach(trained.logprob_gap, trained.logprob_gap_max)
        if breach is not None:
            workflow.logger.warning("step %d: %s", self._start.step, breach)
        self._journal.note(
            training=trained, weights=trained.weights, alarms=(breach,) if breach else ()
        )

    async def _put_rows_back(self) -> None:
        """TransferQueue may have been lost with its rows; where they are there nothing changes."""
        await PUBLISH_BATCH(self._published_request(), summary="put the batch back")

    async def _publish_weights(self) -> None:
        """To the policy engines; what they answer with is evaluated before anything else is."""
        weights = self._journal.result.weights
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
        self._journal.enter(
            StepEvent.WEIGHT_SYNC_STARTED,
            f"brings weights {weights.version} to the policy engines",
        )
        run = self._plan.run
        synced: WeightSyncResult = await workflow.execute_child_workflow(
            "WeightSync",
            WeightSyncInput(run=run, weights=weights, resident=not self._plan.sharing("rollout")),
            id=f"{run.run}.weights-{weights.version}",
            result_type=WeightSyncResult,
            search_attributes=attributes(run=run.run, step=self._start.step),
            static_summary=f"weights {weights.version} of {run.run}",
        )
        show_weights(synced.version)

    async def _evaluate(self) -> None:
        self._journal.enter(
            StepEvent.EVALUATION_STARTED, "waits for the policy engines to evaluate"
        )
        weights = self._journal.result.weights
        await self._gpus.take("acquire", "rollout", purpose="eval", weights=weights)
        self._journal.show("answers the held-out problems")
        evaluation: Evaluation = await self._phases.run(
            EVALUATE_POLICY,
            lambda: EvaluateRequest(
                run=self._plan.run,
                step=self._start.step,
                weight_version=weights.version,
                front=self._phases.front,
                groups=self._phases.groups_of("rollout"),
            ),
            "evaluate",
            role="rollout",
        )
        await self._gpus.done_with("rollout")
        self._journal.note(evaluation=evaluation)

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

    # --- requests

    def _phase_request(self, role: str, source: PhaseResult | None = None) -> PhaseRequest:
        return PhaseRequest(
            run=self._plan.run,
            step=self._start.step,
            weight_version=self._weights.version,
            front=self._phases.front,
            groups=self._phases.groups_of(role),
            source=source.staged if source else None,
        )

    def _published_request(self) -> PublishRequest:
        assert self._scored is not None
        return PublishRequest(run=self._plan.run, step=self._start.step, scored=self._scored)

    # --- ends

    async def _give_up(self, error: BaseException) -> None:
        """Let go of what is held, close the batch's gate with the cause, keep the record."""
        why = self._journal.error = text_of(error)
        workflow.logger.error("step %d gives up: %s", self._start.step, why)
        for role in self._gpus.to_let_go():
            await in_peace(self._gpus.let_go(role))
        await in_peace(self._gpus.fail_batch(why or "unknown"))
        self._journal.enter(StepEvent.GAVE_UP, f"gave up: {why}")
        await in_peace(self._journal.keep())


async def _all_ended(*work: Awaitable[PhaseResult]) -> list[PhaseResult]:
    """All results; a failure is raised once nothing of the rest is at work any more."""
    ended = await asyncio.gather(*work, return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [each for each in ended if not isinstance(each, BaseException)]
