"""What every part of an engine group's workflow needs: its book, its turn, and its calls."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    GroupSnapshot,
)
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.lease import LifecycleInput, RoleOperation, RoleResult
from relax_infer.contracts.refs import StagedRef, WeightsRef
from relax_infer.machines import GroupEvent
from workflows._calls import Call
from workflows._failures import PERMANENT, fail, kind_of, text_of
from workflows._group_book import GroupBook
from workflows._mailbox import Mailbox
from workflows._recoveries import Recoveries
from workflows._visible import show_details, show_state

ASK_AGAIN = 4
"""Times that one operation id is asked for, after a worker or a reply was lost."""


class GroupCore:
    """State of the workflow, and how it acts on engines and tells of them."""

    def __init__(self, start: LifecycleInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._id = f"{start.run.run}.{start.group.role}.{start.group.model}"
        book = carried.get("book")
        self._book = GroupBook.restore(start.group, book) if book else GroupBook(start.group)
        self._book.in_use = bool(carried.get("in_use", False))
        self._mail = Mailbox(carried.get("answers"))
        weights = carried.get("weights")
        self._weights = WeightsRef.model_validate(weights) if weights else None
        self._recoveries = Recoveries(start.group, int(carried.get("recoveries", 0)))
        self._told_so_far = int(carried.get("told", 0))
        self._turn = asyncio.Lock()
        """One operation at a time; a loss that is noticed is one."""
        self._told_with_answer = False

    def _carry(self) -> dict[str, Any]:
        return {
            "book": self._book.carry(),
            "answers": self._mail.carry(),
            "weights": self._weights.model_dump(mode="json") if self._weights else None,
            "in_use": self._book.in_use,
            "recoveries": self._recoveries.made,
            "told": self._told_so_far,
        }

    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None, None]:
        """The group's turn; the role hears what the group has become with the answer or before."""
        async with self._turn:
            self._told_with_answer = False
            try:
                yield
            except GeneratorExit:  # its worker forgets the workflow: there is no loop to tell in
                self._told_with_answer = True
                raise
            finally:
                if not self._told_with_answer:
                    await self._tell_role()

    def _tell_with(self, result: RoleResult) -> RoleResult:
        """The answer to the role, which says what the group has become."""
        self._told_with_answer = True
        self._show()
        return result.model_copy(update={"snapshot": self._next_snapshot()})

    async def _tell_role(self) -> None:
        """The role learns what the group has become before it hears how the operation ended."""
        self._show()
        role = f"{self._start.run.run}.{self._book.spec.role}"
        try:
            await workflow.get_external_workflow_handle(role).signal(
                "group_changed", self._next_snapshot()
            )
        except ApplicationError as error:  # its workflow was ended by hand
            workflow.logger.warning("%s is gone: %s", role, error)

    def _admit(self, operation: RoleOperation) -> None:
        """The workflow's own fence: an operation of an earlier grant is refused here already."""
        if operation.fence is None:
            raise fail(PERMANENT, f"{operation.method} needs the fence token of a grant")
        try:
            loads = operation.method in ("onload", "update")
            self._book.fence.admit(operation.fence, loads=loads)
        except StaleFence as stale:
            raise fail(PERMANENT, str(stale)) from stale

    async def _call(
        self,
        call: Call[EngineOperation, GroupReport],
        operation_id: str,
        doing: str,
        replicas: tuple[int, ...],
        weights: WeightsRef | None = None,
        *,
        word: str | None = None,
        blocks: bool = True,
        spec: EngineGroupSpec | None = None,
    ) -> GroupReport:
        """Run a lifecycle activity. After a lost worker the same operation id is asked again: the
        engines' own actors join it or return its recorded result. Anything else unclear blocks."""
        request = EngineOperation(
            group=spec or self._book.spec,
            operation_id=operation_id,
            fence=self._book.fence.seen or FenceToken(counter=0, grant_id="none"),
            weights=weights,
            replicas=replicas,
            word=word,
            ends_grant=not self._book.in_use,
        )
        summary = f"{self._book.spec.role} {doing}"
        for attempt in range(1, ASK_AGAIN + 1):
            try:
                return await call(request, summary=summary)
            except ActivityError as error:
                if kind_of(error) == PERMANENT or attempt == ASK_AGAIN:
                    if not blocks:
                        raise
                    self._book.move(GroupEvent.OPERATION_UNCONFIRMED)
                    raise fail(kind_of(error), f"{summary}: {text_of(error)}") from error
        raise AssertionError("unreachable")

    def _told(self, doing: str) -> str:
        return f"{self._book.spec.role} {doing}: {self._stuck or self._book.errors()}"

    def _result(
        self, evidence: tuple[StagedRef, ...] = (), holders: tuple[int, ...] | None = None
    ) -> RoleResult:
        reports = [self._book.replicas[k] for k in self._book.ready]
        versions = {r.weight_version for r in reports}
        digests = {r.weights_digest for r in reports}
        asked = self._book.usable if holders is None else holders
        return RoleResult(
            evidence=evidence,
            holders=tuple(self._book.spec.engine_id(k) for k in asked),
            weight_version=versions.pop() if len(versions) == 1 else None,
            weights_digest=digests.pop() if len(digests) == 1 else None,
            state=self._book.state,
            why=self._stuck,
        )

    def _next_snapshot(self) -> GroupSnapshot:
        """For the role, which keeps the newest; not for queries, which change nothing."""
        self._told_so_far += 1
        return self._snapshot().model_copy(update={"number": self._told_so_far})

    @property
    def _stuck(self) -> str | None:
        """What a probe or a person has to say before the group can go on."""
        return self._recoveries.blocked(self._book.failed)

    def _snapshot(self) -> GroupSnapshot:
        return self._book.snapshot().model_copy(update={"stuck": self._stuck})

    def _show(self) -> None:
        book = self._book
        show_state(book.state)
        reports = book.replicas.values()
        rows = [(r.engine_id, f"{r.state} {r.error or r.note or ''}") for r in reports]
        rows += self._recoveries.rows()
        rows += [(f"replica {k}", f"given up: {why}") for k, why in book.given_up.items()]
        doing = f"{book.spec.role} {book.spec.model} is **{book.state}**."
        if book.fence.seen is not None:
            rows.append(("fence", str(book.fence.seen)))
        show_details(doing, rows)
