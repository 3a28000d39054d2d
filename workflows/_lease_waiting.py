"""Workflows that wait for a role in doubt, where a person is refused: they can do nothing else."""

from temporalio import workflow

from relax_infer.contracts.lease import LeaseInput, LeaseRequest
from relax_infer.contracts.mailbox import Ask
from workflows._lease_book import LeaseRefused
from workflows._lease_proving import LeaseProving

_GRANTS = ("begin_batch", "activate", "acquire", "begin_student_scoring")
_GIVES_UP = ("deactivate", "release", "fail_batch")


class LeaseWaiting(LeaseProving):
    """A grant is waited for as long as a person may need, unless who asked for it gives it up."""

    def __init__(self, start: LeaseInput) -> None:
        super().__init__(start)
        self._waiting: dict[str, tuple[str, str]] = {}
        """Operation id of each waiting grant → who asked, and the role."""
        self._given_up: set[str] = set()

    async def _until_known(self, ask: Ask, request: LeaseRequest) -> None:
        """Where the role stands, that ``ask`` is about.

        Raises:
            LeaseRefused: the grant was given up meanwhile.
        """
        role = request.role or "rollout"
        if request.method in _GIVES_UP:
            self._give_up_waiting(ask.asker, None if request.method == "fail_batch" else role)
        if request.method in ("deactivate", "release", "acknowledge_rollout_offloaded"):
            await workflow.wait_condition(lambda: role not in self._book.blocked)
        elif request.method in _GRANTS and ask.asker != f"{self._start.run.run}.{role}":
            await self._wait_for_grant(ask, role)

    async def _wait_for_grant(self, ask: Ask, role: str) -> None:
        self._waiting[ask.operation_id] = ask.asker, role
        try:
            await self._until_free_of_doubt(role, ask.operation_id)
        finally:
            del self._waiting[ask.operation_id]
        if ask.operation_id in self._given_up:
            self._given_up.discard(ask.operation_id)
            raise LeaseRefused(f"{ask.asker} gave up waiting for {role}")

    def _give_up_waiting(self, asker: str, role: str | None) -> None:
        """A step that ends must not be granted GPUs afterwards, which nobody would release."""
        for operation_id, waits in self._waiting.items():
            if waits == (asker, role or waits[1]):
                self._given_up.add(operation_id)

    async def _until_free_of_doubt(self, role: str, operation_id: str = "") -> bool:
        """Whether something had to be waited for: that it is known where the role stands, and every
        role that uses its GPUs."""
        if not self._book.in_doubt_for(role):
            return False
        await workflow.wait_condition(
            lambda: not self._book.in_doubt_for(role) or operation_id in self._given_up
        )
        return True
