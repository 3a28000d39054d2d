"""Phases of a step that may be asked for again, as often as the recipe says."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.lease import RoleOperation, RoleResult
from relax_infer.contracts.run import FrontAddress, RunPlan
from workflows._calls import ENSURE_FRONT, Call
from workflows._failures import PERMANENT, kind_of, text_of
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox
from workflows._step_journal import StepJournal

LONGEST_PAUSE = 20.0
BLOCKED_PAUSE = 5.0
I = TypeVar("I", bound=BaseModel)  # noqa: E741
O = TypeVar("O", bound=BaseModel)  # noqa: E741


class StepPhases:
    """Runs a phase; after a transient failure or a lost worker runs it again.

    A phase asks only for what no shard holds, so a repeat costs what was in flight. Before it the
    engines of its role, router and gateway are brought up again: any may be what failed.
    """

    def __init__(
        self, plan: RunPlan, mail: Mailbox, lease: LeaseClient, journal: StepJournal
    ) -> None:
        self._plan, self._mail, self._lease, self._journal = plan, mail, lease, journal
        self._front: FrontAddress | None = None

    @property
    def front(self) -> FrontAddress:
        """Where router and gateway listen now."""
        assert self._front is not None
        return self._front

    def groups_of(self, role: str) -> tuple[EngineGroupSpec, ...]:
        return tuple(g for g in self._plan.groups if g.role == role)

    async def ensure_front(self) -> None:
        self._front = await ENSURE_FRONT(self._plan.run, summary="router and gateway")

    async def run(
        self,
        call: Call[I, O],
        make: Callable[[], I],
        summary: str,
        *,
        role: str | None = None,
        restore: Callable[[], Awaitable[object]] | None = None,
    ) -> O:
        """The phase's answer.

        Args:
            make: its request, made anew for every attempt: the front may have moved.
            role: whose engines it needs; None: none of ours.
            restore: brings back what else it needs, before another attempt.

        Raises:
            ActivityError: it cannot be had, or not in the recipe's number of attempts.
        """
        pause = 0.5
        for attempt in range(1, self._plan.phase_attempts + 1):
            self._journal.attempted(summary)
            began = workflow.time()
            try:
                done = await call(make(), summary=f"{summary}, attempt {attempt}")
                self._journal.recovered(summary)
                return done
            except ActivityError as error:
                self._journal.failed(summary, attempt, began, error)
                if kind_of(error) == PERMANENT or attempt == self._plan.phase_attempts:
                    raise
                self._journal.show(f"will {summary} again: {text_of(error)}")
                await workflow.sleep(pause)
                pause = min(3 * pause, LONGEST_PAUSE)
                if role is not None:
                    await self._until_ready(role, error)
                await self.ensure_front()
                if restore is not None:
                    await self._restore(restore)
        raise AssertionError("unreachable")

    async def _restore(self, restore: Callable[[], Awaitable[object]]) -> None:
        """What cannot be brought back is for the next attempt to miss, or not to need."""
        try:
            await restore()
        except ActivityError as error:
            if kind_of(error) == PERMANENT:
                raise
            workflow.logger.warning("before another attempt: %s", text_of(error))

    async def _until_ready(self, role: str, error: ActivityError) -> None:
        """Wait until lost engines of the role are rebuilt, for as long as a person may need."""
        while True:
            state = await self._mail.ask(
                f"{self._plan.run.run}.{role}",
                "ready",
                RoleOperation(method="ready", fence=None),
                RoleResult,
                operation_id=self._lease.operation_id("ready", role),
                again=True,
            )
            if state.state == "READY":
                return
            if state.state != "BLOCKED":
                raise error
            self._journal.show(f"waits for the {role} engines: {state.why}")
            await workflow.sleep(BLOCKED_PAUSE)
