"""How a step (or a sync, or a run) deals with the lease."""

from typing import Any

from temporalio import workflow

from relax_infer.contracts.lease import LeaseAnswer, LeaseMethod, LeaseRequest
from relax_infer.contracts.refs import WeightsRef
from workflows._mailbox import Mailbox


class LeaseClient:
    """Asks ``<run>.lease`` on behalf of this workflow.

    A lease that is BLOCKED answers when it is known again where the role stands; so asking has no
    deadline of its own: it waits as long as a person may need.
    """

    def __init__(self, mail: Mailbox, run: str) -> None:
        self._mail = mail
        self._run = run
        self._asked = 0

    def operation_id(self, method: str, role: str | None = None) -> str:
        """Unique in the run: a workflow's run id stands in it, so a retried step is a new asker."""
        self._asked += 1
        who = f"{workflow.info().workflow_id}:{workflow.info().run_id}"
        return f"{who}:{self._asked}:{role + ':' if role else ''}{method}"

    async def ask(self, request: LeaseRequest) -> LeaseAnswer:
        return await self._mail.ask(
            f"{self._run}.lease",
            request.method,
            request,
            LeaseAnswer,
            operation_id=request.operation_id,
        )

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
        return await self._mail.ask(
            f"{self._run}.lease", "close", request, LeaseAnswer, operation_id=request.operation_id
        )

    async def release(self, role: str, *, batch: str | None = None) -> LeaseAnswer:
        """Have ``role`` let go. The lease has read the evidence before it answers."""
        method: LeaseMethod = "deactivate" if batch else "release"
        return await self.take(method, role, batch=batch)
