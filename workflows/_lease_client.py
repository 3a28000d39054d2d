"""How a step (or a sync, or a run) deals with the lease."""

from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.lease import LeaseAnswer, LeaseMethod, LeaseRequest
from relax_infer.contracts.refs import WeightsRef
from workflows._mailbox import Mailbox, NobodyThere


class LeaseClient:
    """Asks ``<run>.lease`` on behalf of this workflow.

    A lease that is BLOCKED answers when it is known again where the role stands; so asking has no
    deadline of its own: it waits as long as a person may need. One that was ended by hand is
    noticed all the same, since an ask that has no answer is sent again.

    Args:
        begin_anew: starts a lease where there is none any more; None: that is an error.
    """

    def __init__(
        self,
        mail: Mailbox,
        run: str,
        begin_anew: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._mail = mail
        self._run = run
        self._begin_anew = begin_anew
        self._asked = 0
        self.begun_anew = 0
        """Leases that were, because one was ended by hand."""

    def operation_id(self, method: str, role: str | None = None) -> str:
        """Unique in the run: a workflow's run id stands in it, so a retried step is a new asker."""
        self._asked += 1
        who = f"{workflow.info().workflow_id}:{workflow.info().run_id}"
        return f"{who}:{self._asked}:{role + ':' if role else ''}{method}"

    async def ask(self, request: LeaseRequest) -> LeaseAnswer:
        """
        Raises:
            NobodyThere: the lease was ended by hand, and nobody begins it anew.
        """
        try:
            return await self._ask(request.method, request)
        except NobodyThere:
            if self._begin_anew is None:
                raise
        await self._begin(self._begin_anew)
        if request.method == "resolve":
            return LeaseAnswer()  # a new lease asks for a word of its own, if it needs one
        return await self._ask(request.method, request)

    async def _ask(self, method: str, request: LeaseRequest) -> LeaseAnswer:
        return await self._mail.ask(
            f"{self._run}.lease",
            method,
            request,
            LeaseAnswer,
            operation_id=request.operation_id,
            again=True,
        )

    async def find(self) -> bool:
        """Whether the lease is there; one that was not has begun anew."""
        lease = workflow.get_external_workflow_handle(f"{self._run}.lease")
        try:
            await lease.signal("holder_known", "trainer")  # a hint: look where in doubt
        except ApplicationError:
            if self._begin_anew is None:
                raise
            await self._begin(self._begin_anew)
            return False
        return True

    async def _begin(self, begin_anew: Callable[[], Awaitable[None]]) -> None:
        self.begun_anew += 1
        await begin_anew()

    def request(self, method: LeaseMethod, **fields: Any) -> LeaseRequest:
        """A request of this workflow under a fresh operation id."""
        role = fields.get("role")
        return LeaseRequest.model_validate(
            {"operation_id": self.operation_id(method, role), "method": method, **fields}
        )

    async def take(
        self,
        method: LeaseMethod,
        role: str | None = None,
        *,
        batch: str | None = None,
        purpose: str | None = None,
        weights: WeightsRef | None = None,
        message: str | None = None,
    ) -> LeaseAnswer:
        """One lease operation of a step."""
        return await self.ask(
            self.request(
                method,
                role=role,
                batch=batch,
                purpose=purpose,
                weights=weights,
                message=message,
            )
        )

    async def ask_to_close(self) -> LeaseAnswer:
        """End the lease workflow; refused while anyone holds the pool."""
        request = self.request("reconcile")
        return await self._ask("close", request)

    async def release(self, role: str, *, batch: str | None = None) -> LeaseAnswer:
        """Have ``role`` let go. The lease has read the evidence before it answers."""
        method: LeaseMethod = "deactivate" if batch else "release"
        return await self.take(method, role, batch=batch)
