"""What every part of a run's workflow needs: where it stands, and how it shows that."""

from contextlib import suppress

from temporalio import workflow
from temporalio.exceptions import WorkflowAlreadyStartedError

from relax_infer.contracts.counted import counted
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import (
    FrontAddress,
    ResolveRun,
    RunCarry,
    RunInput,
    RunPlan,
    RunProgress,
    RunStatus,
    StepResult,
    more_than_accuracy,
)
from relax_infer.machines import RUN, RunEvent, RunState
from workflows._ahead import StepsAhead
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._premises import begin_lease, inference_roles
from workflows._visible import (
    placement_rows,
    show_details,
    show_reward,
    show_state,
    show_weights,
)

_UPDATES = {
    RunEvent.PAUSE_ASKED: "pause",
    RunEvent.RESUME_ASKED: "resume",
    RunEvent.RESOLVED_BY_OPERATOR: "resolve",
    RunEvent.STOP_ASKED: "stop",
}
_STILL_WANTED = {
    RunState.STOPPING: (RunEvent.STOP_ASKED, "stops after this step"),
    RunState.PAUSING: (RunEvent.PAUSE_ASKED, "pauses after this step"),
}
"""What was asked of a run before it had to wait for something else."""
PROGRESS_KEPT = 1000
PROGRESS_SHOWN = 50


class RunCore:
    """State of the workflow, what it has learned so far, and what a person may ask of it."""

    def __init__(self, start: RunInput) -> None:
        self._start = start
        self._id = workflow.info().workflow_id
        self._mail = Mailbox()
        self._lease = LeaseClient(self._mail, self._id, self._begin_lease_anew)
        self._leases_lost = 0
        """Leases of this run that were ended by hand."""
        self._state: RunState = RUN.initial
        self._doing = "reads the recipe"
        self._error: str | None = None
        self._plan: RunPlan | None = None
        self._front: FrontAddress | None = None
        self._weights: WeightsRef | None = None
        self._step = -1
        self._target = start.steps or 0
        self._target_asked = 0
        """Of a person, while the run starts and its recipe's is not known."""
        self._progress: list[RunProgress] = []
        self._histories = 0
        self._steps_here = 0
        self._ahead: StepsAhead | None = None
        self._left = False
        """A step gave up and is not tried again."""
        self._restarts: int = 0
        self._resolved: ResolveRun | None = None
        self._lease_waits: str | None = None
        self._wanted: tuple[RunEvent, str] | None = None
        """Asked before the run was BLOCKED, and heeded once it is not any more."""
        self._words_awaited = 0
        """Parts of the run that wait for a person's word, whatever the lease does."""
        self._bound = False
        self._alarm: str | None = None
        """Why the run pauses, if nobody asked for it."""
        if start.carried is not None:
            self._take_over(start.carried)

    def _take_over(self, carried: RunCarry) -> None:
        self._state = carried.state
        self._plan = carried.plan
        self._front = carried.front
        self._weights = carried.weights
        self._step = carried.step
        self._target = carried.target
        self._progress = list(carried.progress)
        self._histories = carried.histories + 1
        self._restarts = carried.restarts
        self._leases_lost = carried.leases_lost

    def _status(self) -> RunStatus:
        plan = self._plan
        accuracy = [p.accuracy for p in self._progress if p.accuracy is not None]
        reward = [p.reward for p in self._progress if p.reward is not None]
        return RunStatus(
            run=self._id,
            state=self._state,
            doing=self._doing,
            step=max(self._step, 0),
            target=self._target,
            weight_version=self._weights.version if self._weights else None,
            accuracy=accuracy[-1] if accuracy else None,
            reward=reward[-1] if reward else None,
            progress=tuple(self._progress[-PROGRESS_SHOWN:]),
            error=self._error,
            gateway_url=self._front.gateway_url if self._front else None,
            store=plan.run.store if plan else None,
            lease=f"{self._id}.lease" if plan else None,
            roles={role: f"{self._id}.{role}" for role in inference_roles(plan)} if plan else {},
        )

    @property
    def _how_it_ended(self) -> str:
        done = counted(max(self._step, 0), "step")
        if self._step >= self._target:
            return f"is done: {done}"
        return f"was stopped after {done} of {self._target}"

    @property
    def _how_to_resume(self) -> str:
        return f"`relax-infer resume {self._id}` goes on"

    @property
    def _planned(self) -> RunPlan:
        assert self._plan is not None
        return self._plan

    @property
    def _history_is_long(self) -> bool:
        limit = self._start.steps_per_history
        if limit is not None and self._steps_here >= limit:
            return True
        return workflow.info().is_continue_as_new_suggested()

    def _carry(self) -> RunCarry:
        assert self._front is not None
        assert self._weights is not None
        return RunCarry(
            plan=self._planned,
            state=self._state,
            front=self._front,
            step=self._step,
            target=self._target,
            weights=self._weights,
            progress=tuple(self._progress[-PROGRESS_KEPT:]),
            histories=self._histories,
            restarts=self._restarts,
            leases_lost=self._leases_lost,
        )

    def _lease_waits_for(self, reasons: str) -> None:
        """What the lease needs a person for; empty: nothing more."""
        self._lease_waits = reasons or None
        if self._state is RunState.PAUSED:
            rest = f"a person must say of its GPUs: {reasons}" if reasons else self._how_to_resume
            self._show(f"is paused; {rest}")
        if self._state is not RunState.BLOCKED:
            return
        if reasons:  # of one of several
            self._show(f"waits for a person: {reasons}")
        elif self._words_awaited:
            self._show(f"waits for a person: {self._error or 'its roles must be stopped'}")
        else:
            self._move(RunEvent.RESOLVED_BY_OPERATOR, "goes on")
            word = self._resolved
            if word is None or word.action != "stop":
                return
            if RUN.allows(self._state, RunEvent.STOP_ASKED):
                self._move(RunEvent.STOP_ASKED, f"was stopped by {word.who}")

    async def _begin_lease_anew(self) -> None:
        """Nothing of what the lost one knew is built upon: every role has to let go once more, with
        proof, before anything is granted."""
        self._leases_lost += 1
        self._lease_waits_for("")
        workflow.logger.warning("%s.lease was ended by hand; it begins anew", self._id)
        with suppress(WorkflowAlreadyStartedError):  # by another part of the run, a moment ago
            await begin_lease(self._planned, self._leases_lost)

    def _note(self, result: StepResult) -> None:
        batch, training, evaluation = result.batch, result.training, result.evaluation
        self._progress.append(
            RunProgress(
                step=result.step,
                reward=batch.reward_mean if batch else None,
                accuracy=evaluation.accuracy if evaluation else None,
                evaluated=more_than_accuracy(evaluation),
                teacher_kl=batch.teacher_kl if batch else None,
                loss=training.loss if training else None,
                logprob_gap=training.logprob_gap if training else None,
                alarms=result.alarms,
                seconds=result.seconds,
                record=result.record,
            )
        )
        show_weights(result.weights.version)
        show_reward(batch.reward_mean if batch else None)
        self._heed(result)

    def _heed(self, result: StepResult) -> None:
        """Pause where the recipe wants it for an alarm; not after the last step."""
        wanted = result.alarms and self._planned.logprob_bound.action == "pause"
        if wanted and result.step < self._target and RUN.allows(self._state, RunEvent.PAUSE_ASKED):
            self._alarm = f"step {result.step}: {'; '.join(result.alarms)}"
            self._move(RunEvent.PAUSE_ASKED, f"pauses: {self._alarm}")

    def _need(self, event: RunEvent) -> None:
        if not RUN.allows(self._state, event):
            able = [update for legal, update in _UPDATES.items() if RUN.allows(self._state, legal)]
            raise ValueError(
                f"the run is {self._state}: it cannot {_UPDATES[event]} now; what can be asked:"
                f" {', '.join(able) or 'nothing'}"
            )

    def _move(self, event: RunEvent, doing: str) -> None:
        before, wanted = self._state, self._wanted
        self._state = RUN.advance(before, event)
        self._wanted = _STILL_WANTED.get(before) if event is RunEvent.NEEDS_PERSON else None
        if event is RunEvent.RESOLVED_BY_OPERATOR and wanted is not None:
            still, doing = wanted
            self._state = RUN.advance(self._state, still)
        self._show(doing)

    def _show(self, doing: str) -> None:
        self._doing = doing
        show_state(self._state)
        rows = [(f"step {p.step}", _told(p)) for p in self._progress[-5:]]
        rows += [
            ("**warning**", f"step {p.step}: {alarm}")
            for p in self._progress[-5:]
            for alarm in p.alarms
        ]
        if self._plan is not None:
            rows += placement_rows(self._plan)
        text = f"**{self._state}**: {doing}"
        if self._state is RunState.BLOCKED or self._lease_waits:
            text += (
                f"\n\n`relax-infer resolve {self._id} --who NAME --why TEXT` goes on;"
                " add `--stop` to stop, `--confirm-released` when you saw that the named holder"
                " let go of its GPUs."
            )
        show_details(text, rows)


def _told(progress: RunProgress) -> str:
    text = f"reward {_shown(progress.reward)}, accuracy {_shown(progress.accuracy)}"
    return text + "".join(f", {name} {value:.3f}" for name, value in progress.evaluated.items())


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
