"""Where a role stands after an answer was lost: by probes, by evidence, by a person's word."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LeaseRequest, RoleResult
from relax_infer.machines import LeaseEvent, LeaseState
from workflows._failures import PERMANENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._group_gone import end_group
from workflows._lease_core import LeaseCore
from workflows._mailbox import NobodyThere

PAUSE, SLOW_PAUSE = 10.0, 3600.0
"""Most seconds between two probes of a role in doubt, before and after the run was told."""


def what_it_proves(state: str, *, left: bool) -> LeaseEvent | None:
    """What an answer says of a BLOCKED role's lease; None: nothing.

    Args:
        left: a lost lease left the role; if it is up, nobody knows for whom.
    """
    if state in ("SLEEPING", "STOPPED"):
        return LeaseEvent.RELEASE_PROVED
    return LeaseEvent.ACTIVE_PROVED if state == "READY" and not left else None


class LeaseProving(LeaseCore):
    """A BLOCKED lease: nobody is granted the pool until it is known again who holds it."""

    async def _block_until_known(self, role: str, error: ApplicationError) -> None:
        event = (
            LeaseEvent.TIMED_OUT if kind_of(error) == UNCONFIRMED else LeaseEvent.OPERATION_FAILED
        )
        self._book.record(role, event, workflow.time(), reason=text_of(error))
        await self._wait_until_known(role)

    async def _wait_until_known(self, role: str) -> None:
        """Reserve the pool until a probe or a person says where the role stands."""
        self._show()
        # A timer, not a clock: after a workflow task that timed out the clock shows the time of an
        # earlier one, and another in replay.
        patience = asyncio.create_task(workflow.sleep(self._start.reconcile_timeout))
        telling = asyncio.create_task(self._tell_when(role, patience))
        try:
            await self._probe_until_known(role)
        finally:
            patience.cancel()
        await telling
        if role in self._told:
            self._told.discard(role)
            # The others are in what the run is told now: their ends must be, too.
            self._told.update(self._book.blocked)
            await self._tell_run("lease_unblocked")
        self._show()

    async def _probe_until_known(self, role: str) -> None:
        pause = 0.5
        while role in self._book.blocked:
            self._hints.discard(role)
            await self._reconcile_once(role)
            if role not in self._book.blocked:
                break
            # A person may take days, and the role says when to look; but a hint may be lost.
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: role in self._hints or role not in self._book.blocked,
                    timeout=timedelta(seconds=pause),
                )
            pause = min(2 * pause, SLOW_PAUSE if role in self._told else PAUSE)

    async def _tell_when(self, role: str, patience: "asyncio.Task[None]") -> None:
        """At its time, also while a probe waits for an engine that does not answer."""
        with suppress(asyncio.CancelledError):
            await patience
            if role in self._book.blocked and role not in self._told:
                self._told.update(self._book.blocked)
                await self._tell_run("lease_blocked")

    async def _reconcile_once(self, role: str) -> None:
        """One probe under the role's token; only what it proves changes the book, a release by its
        evidence."""
        lease = self._book.roles[role]
        if lease.fence is None or role in self._reconciling or role in self._doubted:
            return
        self._reconciling.add(role)
        try:
            result = await self._look(role, lease.fence)
            proved = what_it_proves(result.state, left=role in self._left)
            asleep = proved is LeaseEvent.RELEASE_PROVED
            wrong = await self._judge(role, lease.fence, result) if asleep else None
        except ApplicationError as error:
            workflow.logger.warning("probe of %s proved nothing: %s", role, text_of(error))
            return
        finally:
            self._reconciling.discard(role)
        if not self._is_blocked_under(role, lease.fence):
            return  # an answer about an earlier grant
        if wrong is not None:
            self._doubted.add(role)
            self._book.explain(role, text_of(wrong))
        elif proved is not None:
            if not asleep:
                self._proved[role] = result
            self._book.record(role, proved, workflow.time())

    async def _look(self, role: str, fence: FenceToken) -> RoleResult:
        """Where it stands. What a lost lease left may be at work, and nobody knows for whom any
        more: it lets go. What has nothing up cannot, and says so when it is probed."""
        if role in self._left:
            try:
                gone = await self._have(role, "offload", fence, None)
            except ApplicationError as error:
                workflow.logger.info("%s did not let go, so it is probed: %s", role, text_of(error))
            else:
                return gone.model_copy(update={"state": "SLEEPING"})
        return await self._have(role, "probe", fence, None)

    async def _find_out(self) -> None:
        """Every role that a lost lease left is in doubt until it is known to have let go."""

        async def find_out(role: str) -> None:
            await self._wait_until_known(role)
            self._left.discard(role)

        await asyncio.gather(*(find_out(role) for role in sorted(self._left)))

    def _is_blocked_under(self, role: str, fence: FenceToken | None) -> bool:
        """Still, after something was waited for."""
        now = self._book.roles[role]
        return now.state is LeaseState.BLOCKED and now.fence == fence

    async def _resolve(self, request: LeaseRequest) -> None:
        for role in self._book.blocked:
            if request.role in (None, role):
                await self._resolve_role(role, f"{request.who}: {request.why}")
        batch = self._book.batch
        meant = batch is not None and request.batch in (None, batch.batch)
        if request.abandon and meant:  # what is BLOCKED stays reserved all the same
            self._book.abandon_batch()

    async def _resolve_role(self, role: str, word: str) -> None:
        """The word stands for what cannot be proved; what can answer lets go, or goes on."""
        fence, told = self._book.roles[role].fence, role in self._doubted
        try:
            result = await self._have(role, "resolve", fence, None, word=word)
        except NobodyThere as gone:
            if fence is None:
                raise
            result = await self._end_groups_of(role, fence, word, gone)
        state, asleep = result.state, result.state in ("SLEEPING", "STOPPED")
        if asleep and result.evidence and fence is not None and not told:
            # A person who was not told of a contradiction has not looked for what it is about.
            wrong = await self._judge(role, fence, result)
            if wrong is not None and self._is_blocked_under(role, fence):
                self._doubted.add(role)
                self._book.explain(role, text_of(wrong))
                raise fail(PERMANENT, f"{text_of(wrong)} Look again; the next word stands.")
        if not self._is_blocked_under(role, fence):
            return  # a probe proved it meanwhile
        self._doubted.discard(role)
        if asleep:
            self._book.record(role, LeaseEvent.RESOLVED_BY_OPERATOR, workflow.time())
            self._resolved_by[role] = word
        elif state == "READY":
            await self._reconcile_once(role)
        else:
            raise fail(UNCONFIRMED, f"{role} is {state} also after the word of {word}")

    async def _end_groups_of(
        self, role: str, fence: FenceToken, word: str, gone: NobodyThere
    ) -> RoleResult:
        """In the place of a role whose workflow was ended by hand."""
        if not (groups := self._groups.get(role)):
            told = "it never said which engines it has: stop them with `relax-infer down`"
            raise fail(UNCONFIRMED, f"{text_of(gone)}; {told}") from gone
        run, operation_id = self._start.run.run, self._next_id("resolve")
        for spec in groups:
            await end_group(
                self._mail,
                f"{run}.{role}.{spec.model}",
                spec,
                fence,
                word,
                operation_id,
                self._start.operation_timeout,
            )
        return RoleResult(state="STOPPED")
