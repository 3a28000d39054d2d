"""TrainingRun: a run from its recipe to its last step."""

import itertools

from temporalio import workflow
from temporalio.exceptions import ApplicationError, ChildWorkflowError, FailureError

from relax_infer.contracts.lease import LeaseRequest
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.run import (
    ResolveRequest,
    ResolveRun,
    RunInput,
    RunStatus,
    StepInput,
    StepResult,
    TurnAnswer,
    batch_of,
)
from relax_infer.machines import RUN, RunEvent, RunState
from workflows._ahead import StepsAhead
from workflows._calls import (
    BIND_PLACEMENT,
    RELEASE_PLACEMENT,
    RESOLVE_RECIPE,
)
from workflows._failures import PERMANENT, fail, in_peace, text_of
from workflows._lease_book import NOTHING_BLOCKED
from workflows._premises import Premises
from workflows._run_core import RunCore
from workflows._versions import AUTO_UPGRADE
from workflows._visible import (
    attributes,
    show_run,
)

NOTHING_GIVEN = RunInput(recipe="")
"""Stands for the input of a run that was started without one. Without a default the run would wait
for ever for code that takes none; with None the type would be a union, whose errors say less."""
RESTARTS = 3
"""Times that a person may have every role of a run restarted."""


@workflow.defn(name="TrainingRun", versioning_behavior=AUTO_UPGRADE)
class TrainingRun(RunCore):
    """Brings lease, roles, trainer and servers up, runs step after step, and takes all down again.

    Continues as new between steps only; lease, roles and engine groups live on meanwhile.
    """

    @workflow.init
    def __init__(self, start: RunInput = NOTHING_GIVEN) -> None:
        super().__init__(start)

    # --- ways in

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        """A step asks for its turn, or gives it back."""
        await self._mail.serve(ask, self._serve_step)

    async def _serve_step(self, ask: Ask) -> TurnAnswer:
        if self._ahead is None:
            raise ValueError("the steps of this run do not overlap: there are no turns")
        return await self._ahead.serve(ask)

    @workflow.signal
    def lease_blocked(self, reasons: str) -> None:
        """The lease waits for a person."""
        self._lease_waits = reasons
        if RUN.allows(self._state, RunEvent.NEEDS_PERSON):
            self._move(RunEvent.NEEDS_PERSON, f"waits for a person: {reasons}")
        elif self._state is RunState.PAUSED:
            self._show(f"is paused; a person must say of its GPUs: {reasons}")

    @workflow.signal
    def lease_unblocked(self, reasons: str) -> None:
        """The lease knows again where every role stands."""
        self._lease_waits_for(reasons)

    @workflow.query
    def status(self) -> RunStatus:
        return self._status()

    @workflow.update
    def pause(self) -> RunStatus:
        """End the current step and begin no other."""
        self._move(RunEvent.PAUSE_ASKED, "pauses after this step")
        return self.status()

    @pause.validator
    def _check_pause(self) -> None:
        self._need(RunEvent.PAUSE_ASKED)

    @workflow.update
    def resume(self) -> RunStatus:
        """Go on after a pause."""
        self._move(RunEvent.RESUME_ASKED, "goes on")
        if self._lease_waits:  # it was told while the run was paused
            self.lease_blocked(self._lease_waits)
        return self.status()

    @resume.validator
    def _check_resume(self) -> None:
        self._need(RunEvent.RESUME_ASKED)

    @workflow.update
    def stop(self) -> RunStatus:
        """End after the current step, or when the role that is being brought up is up; everything
        is taken down and the store is kept."""
        when = "before its first" if self._state is RunState.STARTING else "after this"
        doing = f"stops {when} step"
        if self._lease_waits:
            doing += f"; a person must still say of its GPUs: {self._lease_waits}"
        self._move(RunEvent.STOP_ASKED, doing)
        return self.status()

    @stop.validator
    def _check_stop(self) -> None:
        self._need(RunEvent.STOP_ASKED)

    @workflow.update
    def set_target_steps(self, steps: int) -> RunStatus:
        """Train until ``steps`` instead; the step at work is not cut short."""
        self._target = self._target_asked = steps
        return self.status()

    @set_target_steps.validator
    def _check_set_target_steps(self, steps: int) -> None:
        if self._state in (RunState.STOPPING, RunState.DONE, RunState.FAILED):
            raise ValueError(f"the run is {self._state}: its target cannot change any more")
        if steps < 1:
            raise ValueError(f"{steps} is no target: a run has one step at least; stop it instead")
        if steps <= self._step:
            raise ValueError(f"step {self._step} is done already: the target must lie beyond it")

    @workflow.update
    async def resolve(self, resolution: ResolveRun) -> RunStatus:
        """A person's word: go on (retry) or stop; for a BLOCKED lease, that its holder is gone."""
        self._resolved = resolution
        if self._lease_waits is not None:
            try:
                await self._lease.ask(self._lease_resolution(resolution))
            except ApplicationError as error:
                if NOTHING_BLOCKED not in str(error):
                    if self._resolved is resolution:
                        self._resolved = None
                    raise
                self._lease_waits_for("")  # for nobody, whoever said that it does
        return self.status()

    @resolve.validator
    def _check_resolve(self, resolution: ResolveRun) -> None:
        waits = self._state is RunState.BLOCKED or self._words_awaited > 0
        if not waits and self._lease_waits is None:
            raise ValueError(f"the run is {self._state}, not BLOCKED: there is nothing to resolve")
        if not resolution.who.strip() or not resolution.why.strip():
            raise ValueError("resolve needs who looked and why it is safe to go on")
        if resolution.action == "restart" and not self._words_awaited:
            raise ValueError(
                f"no step waits for a word, its GPUs do ({self._lease_waits}): resolve with"
                " confirm_released; every role can be restarted when a step has given up"
            )
        if resolution.action == "restart" and self._ahead is not None and self._ahead.several:
            raise ValueError(
                f"steps {', '.join(map(str, self._ahead.steps))} are open: stop the run instead; a"
                " restart of every role would hurt those that do not wait"
            )
        if resolution.action == "restart" and self._restarts >= RESTARTS:
            raise ValueError(
                f"the run was restarted {self._restarts} times already: stop it and look for the"
                " cause; a new run goes on from its checkpoint"
            )
        if self._lease_waits is not None and not resolution.confirm_released:
            raise ValueError(
                f"{self._lease_waits}: look at the processes on the node (fence off or power"
                " down one that does not answer), then resolve with confirm_released"
            )

    # --- the run

    @workflow.run
    async def run(self, start: RunInput = NOTHING_GIVEN) -> RunStatus:
        if not start.recipe:
            raise fail(
                PERMANENT,
                "no recipe was given: start TrainingRun with an input that names one, such as"
                ' --input \'{"recipe": "quickstart"}\'',
            )
        show_run(self._id)
        if start.carried is None:
            try:
                await self._bring_up()
            except FailureError as error:
                if await self._fail_to_start(error):
                    return self.status()
                raise fail(PERMANENT, self._error or "") from error
        while self._state is not RunState.STOPPING:
            await self._next_step()
        await self._take_down()
        self._move(RunEvent.RELEASE_PROVED, self._how_it_ended)
        return self.status()

    async def _next_step(self) -> None:
        """One step, or a wait for the person who paused or must decide."""
        if self._state is RunState.PAUSING:
            why = f" ({self._alarm})" if self._alarm else ""
            self._alarm = None
            self._move(RunEvent.STEP_ENDED, f"is paused{why}; {self._how_to_resume}")
        if self._state in (RunState.PAUSED, RunState.BLOCKED):
            await workflow.wait_condition(
                lambda: self._state not in (RunState.PAUSED, RunState.BLOCKED)
            )
            return
        if self._step >= self._target:
            self._move(RunEvent.TARGET_REACHED, "takes everything down")
            return
        if self._history_is_long:
            await workflow.wait_condition(workflow.all_handlers_finished)
            workflow.continue_as_new(self._start.model_copy(update={"carried": self._carry()}))
        if self._planned.max_staleness > 0 and self._step >= 0:
            await self._run_ahead()
        else:
            await self._take_step(self._step + 1)

    async def _run_ahead(self) -> None:
        """Steps overlap, until a person wants something else or all is done."""
        assert self._weights is not None
        ahead = self._ahead = StepsAhead(
            self._planned.max_staleness, self._weights, self._take_step
        )
        try:
            while True:
                await ahead.reap()
                if self._may_begin(ahead):
                    ahead.begin()
                    self._show(f"steps {', '.join(map(str, ahead.steps))} of {self._target}")
                elif self._left or not ahead.steps:
                    return
                else:
                    await workflow.wait_condition(
                        lambda: ahead.ended_one or self._left or self._may_begin(ahead)
                    )
        finally:
            await ahead.cancel()

    def _may_begin(self, ahead: StepsAhead) -> bool:
        goes_on = self._state is RunState.RUNNING and not self._history_is_long
        return goes_on and ahead.newest < self._target and ahead.may_begin

    async def _take_step(self, step: int) -> None:
        """Until it is done; a step that gives up waits for a person, and is tried again or left."""
        for attempt in itertools.count(1):
            lost = self._leases_lost
            try:
                result = await self._try_step(step, attempt)
            except ChildWorkflowError as error:
                if self._ahead is not None:
                    self._ahead.ended(step)
                if await self._lost_its_lease(step, lost):
                    continue
                if not await self._wait_for_person(step, attempt, error):
                    return
            else:
                if self._ahead is not None:
                    self._ahead.ended(step)
                self._steps_here += 1
                self._step, self._weights = step, result.weights
                self._note(result)
                return

    async def _try_step(self, step: int, attempt: int) -> StepResult:
        plan = self._planned
        assert self._weights is not None
        if self._ahead is None:
            self._show(f"step {step} of {self._target}")
        last = step == self._target
        every = plan.evaluation_every
        return await workflow.execute_child_workflow(
            "TrainingStep",
            StepInput(
                step=step,
                plan=plan,
                weights=self._weights,
                evaluate=every > 0 and (step % every == 0 or last),
                last=last,
                attempt=attempt,
            ),
            id=f"{self._id}.step-{step}",
            result_type=StepResult,
            search_attributes=attributes(run=self._id, step=step),
            static_summary=f"step {step} of {self._id}",
        )

    async def _lost_its_lease(self, step: int, lost: int) -> bool:
        """Whether a step gave up because the lease was ended by hand; it has begun anew then, and
        the step is tried again: whatever it had is proved to be gone before anything is granted.

        Args:
            lost: leases that were when the step began.
        """
        if self._is_stopping:
            return False
        await self._lease.find()
        if self._leases_lost > lost:
            self._show(f"tries step {step} again: its lease was ended by hand")
        return self._leases_lost > lost

    async def _wait_for_person(self, step: int, attempt: int, error: FailureError) -> bool:
        """A step gave up; its files are kept. Whether a person has it tried again."""
        self._error = text_of(error)
        if self._state is RunState.STOPPING:
            self._left = True
            return False
        self._resolved = None
        if self._state is RunState.BLOCKED:
            self._show(f"{self._doing}; step {step} gave up: {self._error}")
        elif RUN.allows(self._state, RunEvent.NEEDS_PERSON):
            self._move(RunEvent.NEEDS_PERSON, f"step {step} gave up: {self._error}")
        self._words_awaited += 1
        try:
            tried_again = await self._heed_person(step, attempt)
        finally:
            self._words_awaited -= 1
        # Steps that overlap may all have given up: the run goes on when the last was decided on.
        if tried_again and RUN.allows(self._state, RunEvent.RESOLVED_BY_OPERATOR):
            if self._words_awaited == 0:
                self._error = None
                self._move(RunEvent.RESOLVED_BY_OPERATOR, f"tries step {step} again")
            else:
                self._show(f"tries step {step} again; waits for a person: {self._error}")
        return tried_again

    async def _heed_person(self, step: int, attempt: int) -> bool:
        """Whether their word has the step tried again; one that cannot be carried out is answered
        with the reason, and the next is waited for."""
        while True:
            await workflow.wait_condition(lambda: self._resolved is not None or self._is_stopping)
            word = self._resolved
            if word is None or word.action == "stop" or self._is_stopping:
                self._left = True
                if word is not None and RUN.allows(self._state, RunEvent.STOP_ASKED):
                    self._move(RunEvent.STOP_ASKED, f"was stopped by {word.who}")
                return False
            try:
                await self._carry_out(word, batch_of(step, attempt))
            except FailureError as error:
                self._error = f"the word of {word.who} was not carried out: {text_of(error)}"
                self._show(f"waits for a person: {self._error}")
                if self._resolved is word:
                    self._resolved = None
                continue
            self._left = self._is_stopping
            return not self._left

    async def _carry_out(self, word: ResolveRun, batch: str) -> None:
        """What was left of the step is ended; then, if they want it, every role begins anew."""
        named = batch if self._ahead is not None else None
        await self._lease.ask(self._lease_resolution(word, abandon=True, batch=named))
        if word.action == "restart":
            self._restarts += 1
            await self._premises.restart(self._restarts)

    def _lease_resolution(
        self, resolution: ResolveRun, *, abandon: bool = False, batch: str | None = None
    ) -> LeaseRequest:
        return self._lease.request(
            "resolve",
            who=resolution.who,
            why=resolution.why,
            confirm_released=resolution.confirm_released,
            abandon=abandon,
            batch=batch,
        )

    # --- up and down

    async def _bring_up(self) -> None:
        """Recipe, GPUs, lease, roles, servers; then every role once under the lease, so that what
        cannot work is found before the first step."""
        self._plan = await RESOLVE_RECIPE(
            ResolveRequest(
                run=self._id,
                start=self._start,
                execution=workflow.info().first_execution_run_id,
            ),
            summary="read the recipe",
        )
        self._target = self._target_asked or self._plan.steps
        self._weights = self._plan.initial_weights
        if self._plan.begins_after:  # the policy engines load its weights with the first batch
            self._step = self._plan.begins_after
        self._show("binds GPUs")
        bound = await BIND_PLACEMENT(self._plan, summary="bind GPUs")
        self._plan = bound.plan
        self._bound = True
        self._front = await self._premises.open()
        if self._state is RunState.STARTING:
            self._move(RunEvent.STARTED, "is running")

    async def _take_down(self) -> None:
        await self._premises.close()
        self._front = None
        # A person had to resolve something on the way down, and may have asked for a pause since.
        if self._state in (RunState.RUNNING, RunState.PAUSING):
            self._move(RunEvent.STOP_ASKED, "stops")

    async def _ask_person(self, trouble: str, then: str) -> str | None:
        """A role cannot be stopped: their word that nothing is left, if they gave it."""
        self._resolved = None
        if RUN.allows(self._state, RunEvent.NEEDS_PERSON):
            self._move(RunEvent.NEEDS_PERSON, trouble)
        self._words_awaited += 1
        await workflow.wait_condition(lambda: self._resolved is not None)
        self._words_awaited -= 1
        word = _word(self._resolved)
        # Several roles may have to be decided on; the run goes on when the last was.
        if self._words_awaited == 0 and RUN.allows(self._state, RunEvent.STOP_ASKED):
            self._move(RunEvent.STOP_ASKED, then)
        return word

    async def _fail_to_start(self, error: FailureError) -> bool:
        """Say why, take down what was brought up, end FAILED; or DONE, if it was stopped anyway."""
        self._error = text_of(error)
        self._show(f"cannot start: {self._error}; takes down what was brought up")
        if self._bound:
            await in_peace(self._take_down())
        elif self._plan is not None:  # no lease, role or server was begun: nobody could be asked
            await in_peace(RELEASE_PLACEMENT(self._plan.run, summary="placement group"))
        if self._state is RunState.STOPPING:
            self._move(RunEvent.RELEASE_PROVED, "was stopped before its first step")
            return True
        self._move(RunEvent.GAVE_UP, f"could not start: {self._error}")
        return False

    # --- pieces

    @property
    def _is_stopping(self) -> bool:
        return self._state is RunState.STOPPING

    @property
    def _premises(self) -> Premises:
        return Premises(
            self._planned,
            self._mail,
            self._lease,
            self._show,
            self._ask_person,
            leaving=lambda: self._is_stopping,
        )


def _word(resolved: ResolveRun | None) -> str | None:
    """That nothing is left, if that is what they say."""
    if resolved is None or not resolved.confirm_released:
        return None
    return f"{resolved.who}: {resolved.why}"
