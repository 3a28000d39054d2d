"""What every part of the lease's workflow needs: its book, its calls, and how it shows itself."""

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from relax_infer.contracts.engines import EngineGroupSpec, OffloadCheck
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LeaseInput, RoleOperation, RoleResult
from relax_infer.contracts.refs import WeightsRef
from relax_infer.machines import LeaseState
from workflows._calls import CONFIRM_OFFLOAD
from workflows._failures import PERMANENT, fail, text_of
from workflows._lease_book import NUMBERS_PER_LEASE, LeaseBook
from workflows._mailbox import Mailbox
from workflows._operations import Operations
from workflows._trainer_role import TrainerRole
from workflows._visible import show_details, show_state


class LeaseCore:
    """State of the workflow, and how it has roles do something and judges what they answer."""

    def __init__(self, start: LeaseInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._book = LeaseBook.restore(carried["book"]) if carried else _book_of(start)
        self._mail = Mailbox(remembers=False)
        """Its operations do: an ask that comes again joins one of these or gets its result."""
        self._operations = Operations(carried.get("operations"))
        self._resolved_by: dict[str, str] = dict(carried.get("resolved_by", {}))
        self._groups: dict[str, tuple[EngineGroupSpec, ...]] = {
            role: tuple(EngineGroupSpec.model_validate(each) for each in groups)
            for role, groups in carried.get("groups", _groups_of(start)).items()
        }
        """What each role said that it operates on."""
        self._proved: dict[str, RoleResult] = {
            role: RoleResult.model_validate(seen)
            for role, seen in carried.get("proved", {}).items()
        }
        """What each role said when it was last known to be up."""
        self._asked = int(carried.get("asked", start.lost * NUMBERS_PER_LEASE))
        self._reconciling: set[str] = set()
        self._hints: set[str] = set()
        self._told: set[str] = set()
        """BLOCKED roles that the run waits for a person to look at."""
        self._doubted: set[str] = set(carried.get("doubted", []))
        """Roles whose evidence of release contradicted them."""
        self._left: set[str] = set(self._book.roles) if start.lost and not carried else set()
        """Roles that a lost lease left, until each is known to have let go."""
        self._trainer = (
            TrainerRole(start.trainer, start.operation_timeout) if start.trainer else None
        )

    def _carry(self) -> dict[str, Any]:
        """For continue-as-new, when no operation is at work."""
        return {
            "book": self._book.carry(),
            "operations": self._operations.carry(),
            "asked": self._asked,
            "doubted": sorted(self._doubted),
            "proved": {role: seen.model_dump(mode="json") for role, seen in self._proved.items()},
            "resolved_by": self._resolved_by,
            "groups": {
                role: [each.model_dump(mode="json") for each in groups]
                for role, groups in self._groups.items()
            },
        }

    async def _judge(
        self, role: str, fence: FenceToken, result: RoleResult
    ) -> ApplicationError | None:
        """Read the evidence of a release before anybody else is granted; None: it proves it."""
        if not result.holders:
            return None
        check = OffloadCheck.model_validate(
            {"role": role, "fence": fence, "evidence": result.evidence, "holders": result.holders}
        )
        try:
            await CONFIRM_OFFLOAD[role](check, summary=f"evidence of {role}")
        except ActivityError as error:
            return fail(PERMANENT, text_of(error))
        return None

    async def _have(
        self,
        role: str,
        method: str,
        fence: FenceToken | None,
        weights: WeightsRef | None,
        word: str | None = None,
    ) -> RoleResult:
        """Have a role carry out ``method`` under ``fence``."""
        operation = RoleOperation.model_validate(
            {"method": method, "fence": fence, "weights": weights, "word": word}
        )
        operation_id = self._next_id(method)
        if role == "trainer":
            assert self._trainer is not None
            return await self._trainer.perform(operation, operation_id)
        result = await self._mail.ask(
            f"{self._start.run.run}.{role}",
            method,
            operation,
            RoleResult,
            operation_id=operation_id,
            timeout=self._start.operation_timeout,
        )
        if not result.groups:
            return result
        self._groups[role] = result.groups
        return result.model_copy(update={"groups": ()})

    def _next_id(self, method: str) -> str:
        """Of the next operation on a role."""
        self._asked += 1
        return f"{self._start.run.run}.lease-{self._start.pool}.{self._asked}.{method}"

    async def _tell_run(self, signal: str) -> None:
        reasons = "; ".join(f"{r}: {self._book.roles[r].reason}" for r in self._book.blocked)
        try:
            await workflow.get_external_workflow_handle(self._start.run.run).signal(signal, reasons)
        except ApplicationError as error:
            workflow.logger.warning("the run cannot be told that the lease waits: %s", error)

    def _show(self) -> None:
        book = self._book
        if book.blocked:
            show_state(LeaseState.BLOCKED)
            reasons = "; ".join(f"{r}: {book.roles[r].reason}" for r in book.blocked)
            doing = (
                f"**BLOCKED.** {reasons}. The pool stays reserved and probes go on; a person is"
                f" asked after {self._start.reconcile_timeout:.0f} s, and decides with:\n\n"
                f"`relax-infer resolve {self._start.run.run} --who NAME --why TEXT"
                " --confirm-released`"
            )
        elif book.holders:
            held = [f"{role} {book.roles[role].state}" for role in book.holders]
            show_state(", ".join(held))
            doing = f"Held by **{'**, **'.join(held)}**."
        else:
            show_state("FREE")
            doing = "Nobody holds the pool."
        batch = f"{book.batch.batch}: {book.batch.state}" if book.batch else "none"
        rows = [(role, str(lease.state)) for role, lease in book.roles.items()]
        show_details(doing, [*rows, ("batch", batch), ("fence", str(book.fence_counter))])


def _groups_of(start: LeaseInput) -> dict[str, tuple[EngineGroupSpec, ...]]:
    mine = sorted({group.role for group in start.groups})
    return {role: tuple(g for g in start.groups if g.role == role) for role in mine}


def _book_of(start: LeaseInput) -> LeaseBook:
    """Of a lease that begins."""
    if not start.lost:
        return LeaseBook(start.pool, start.roles, start.apart)
    return LeaseBook.begun_anew(
        start.pool, start.roles, start.apart, run=start.run.run, lost=start.lost, at=workflow.time()
    )
