"""What a step tells about itself while it is at work, and what it writes down in the end."""

from typing import Any

from temporalio import workflow

from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import (
    PhaseRetry,
    PhaseTime,
    RecordRequest,
    StepInput,
    StepRecord,
    StepResult,
    StepStatus,
)
from relax_infer.machines import STEP, StepEvent, StepPhase
from workflows._calls import WRITE_STEP_RECORD
from workflows._failures import text_of
from workflows._visible import show_details, show_state


class StepJournal:
    """Phase and result of a step, with its times and retries; shown in the web UI as they change.

    ``result`` grows by :meth:`note`; what gave up leaves its words in ``error``.
    """

    def __init__(self, start: StepInput) -> None:
        self._run: RunRef = start.plan.run
        self._step = start.step
        self.phase: StepPhase = STEP.initial
        self.result = StepResult(step=start.step, weights=start.weights)
        self.error: str | None = None
        self._doing = ""
        self._began = self._entered = workflow.time()
        self._phases: list[PhaseTime] = []
        self._attempts: dict[str, int] = {}
        self._retries: list[PhaseRetry] = []

    def status(self) -> StepStatus:
        return StepStatus(
            step=self._step,
            phase=self.phase,
            doing=self._doing,
            attempts=self._attempts,
            error=self.error,
        )

    def note(self, **found: Any) -> None:
        """Fields of the result that are known now."""
        self.result = self.result.model_copy(update=found)

    def enter(self, event: StepEvent, doing: str) -> None:
        """Advance the phase; the one left goes into the record with its time."""
        now = workflow.time()
        self._phases.append(
            PhaseTime(phase=self.phase, started=self._entered, seconds=now - self._entered)
        )
        self.phase = STEP.advance(self.phase, event)
        self._entered = now
        self.show(doing)

    def show(self, doing: str) -> None:
        self._doing = doing
        show_state(self.phase)
        rows = [("**warning**", alarm) for alarm in self.result.alarms]
        evaluation = self.result.evaluation
        if evaluation is not None:
            told = evaluation.scores or {"accuracy": evaluation.accuracy}
            pinned = f"with weights {evaluation.weight_version}"
            rows += [(name, f"{value:.3f} {pinned}") for name, value in told.items()]
        rows += [(str(p.phase), f"{p.seconds:.2f} s") for p in self._phases]
        show_details(f"Step {self._step} {doing}. **{self.phase}**", rows)

    # --- attempts of a piece of work

    def attempted(self, what: str) -> None:
        self._attempts[what] = self._attempts.get(what, 0) + 1

    def failed(self, what: str, attempt: int, began: float, error: BaseException) -> None:
        self._retries.append(
            PhaseRetry(
                phase=self.phase,
                what=what,
                attempt=attempt,
                began=began,
                failed=workflow.time(),
                error=text_of(error),
            )
        )

    def recovered(self, what: str) -> None:
        """The failures of this work so far were made good."""
        now = workflow.time()
        self._retries = [
            each.model_copy(update={"recovered": now})
            if each.what == what and each.recovered is None
            else each
            for each in self._retries
        ]

    # --- the record

    async def keep(self) -> StepResult:
        """Write the record to the store; the result names it."""
        result = self.result.model_copy(update={"phases": tuple(self._phases)})
        record = StepRecord(
            run=self._run.run,
            step=self._step,
            outcome=self.phase,
            result=result,
            error=self.error,
            retries=tuple(self._retries),
        )
        staged = await WRITE_STEP_RECORD(
            RecordRequest(run=self._run, record=record, since=self._began),
            summary="step record",
        )
        self.result = result.model_copy(update={"record": staged})
        return self.result
