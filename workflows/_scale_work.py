"""What both directions of a scale operation need: its state, its rows, and whom it asks."""

from collections.abc import Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from relax_infer.contracts.engines import AddedReplica
from relax_infer.contracts.scale import (
    MemberAsk,
    Members,
    OutsiderRecord,
    ScaleFailure,
    ScaleInput,
    ScaleReplica,
    ScaleStatus,
)
from relax_infer.machines import SCALE, ScaleEvent, ScaleState
from workflows._failures import UNCONFIRMED, fail, text_of
from workflows._mailbox import Mailbox
from workflows._remains import clear
from workflows._visible import show_details, show_state

SPARE_SECONDS = 120.0
"""Beyond what a role or a group may take for a step, for the way there and back."""


class ScaleWork:
    """One operation at work."""

    def __init__(self, start: ScaleInput, mail: Mailbox) -> None:
        self.start, self.request, self._mail = start, start.request, mail
        self.state: ScaleState = SCALE.initial
        self.rows: list[ScaleReplica] = []
        self.facts: dict[str, Any] = {}
        """Fields of the status beside state and rows."""
        self.called_off = False
        """A person cancelled it while that was legal."""
        self.ending: str | None = None
        """Why it has to come to its end: the role is going down."""
        self._asked = 0

    # --- told

    def status(self, **more: Any) -> ScaleStatus:
        return ScaleStatus(
            operation_id=self.request.operation_id,
            run=self.start.run.run,
            role=self.start.role,
            model=self.start.model,
            state=self.state,
            target=self.request.num_replicas,
            by=self.request.by,
            reason=self.request.reason,
            dry_run=self.request.dry_run,
            replicas=tuple(self.rows),
            **{**self.facts, **more},
        )

    async def move(self, event: ScaleEvent) -> None:
        """The role hears of every state; should it be gone, the next question says so."""
        self.state = SCALE.advance(self.state, event)
        await self.tell()

    async def tell(self) -> None:
        self.show()
        role = workflow.get_external_workflow_handle(self._role)
        try:
            await role.signal("scale_changed", self.status())
        except FailureError as error:
            workflow.logger.warning("%s does not hear of its scaling: %s", self._role, error)

    def show(self) -> None:
        show_state(self.state)
        start = self.start
        doing = f"Scale operation {self.request.operation_id} on {start.role} {start.model}"
        if self.request.reason is not None:
            doing = f"{doing} ({self.request.by}: {self.request.reason})"
        rows = [
            (
                row.engine_id or row.url or "a new replica",
                ", ".join(str(part) for part in (row.outcome, row.failure, row.why) if part),
            )
            for row in self.rows
        ]
        show_details(f"{doing} is **{self.state}**. {self.facts.get('why') or ''}".strip(), rows)

    def row_at(self, url: str, **fields: Any) -> None:
        """Change the row of an engine of others."""
        for k, row in enumerate(self.rows):
            if row.url == url and row.replica is None:
                self.rows[k] = row.model_copy(update=fields)

    def row(self, replica: int, **fields: Any) -> None:
        """Change the row of a replica, or add one."""
        for k, row in enumerate(self.rows):
            if row.replica == replica:
                self.rows[k] = row.model_copy(update=fields)
                return
        self.rows.append(ScaleReplica(replica=replica, **fields))

    # --- asked

    @property
    def _role(self) -> str:
        return f"{self.start.run.run}.{self.start.role}"

    def next_id(self, what: str) -> str:
        self._asked += 1
        return f"{workflow.info().workflow_id}.{self._asked}.{what}"

    async def ask_group(self, method: str, **fields: Any) -> Members:
        """What concerns the table alone."""
        return await self._ask(f"{self._role}.{self.start.model}", method, fields)

    async def ask_role(self, method: str, **fields: Any) -> Members:
        """What has to be published before it is answered."""
        return await self._ask(self._role, method, fields)

    async def _ask(self, whom: str, method: str, fields: dict[str, Any]) -> Members:
        ask = MemberAsk.model_validate(
            {
                "method": method,
                "model": self.start.model,
                "operation": self.request.operation_id,
                **fields,
            }
        )
        return await self._mail.ask(
            whom,
            method,
            ask,
            Members,
            operation_id=self.next_id(method),
            timeout=ask.timeout + self.start.operation_timeout + SPARE_SECONDS,
        )

    def give_way(self, why: str) -> None:
        """Somebody else's operation waits for the end of this one: what is not routed yet will not
        be. What leaves goes on, since nobody calls it any more."""
        if SCALE.allows(self.state, ScaleEvent.CANCEL_ASKED):
            self.called_off = True
        elif self.facts.get("direction") == "out":
            self.ending = self.ending or why

    async def until(self, condition: Callable[[], bool]) -> None:
        await workflow.wait_condition(lambda: condition() or self.ending is not None)

    # --- ended

    async def end(self, record: OutsiderRecord) -> OutsiderRecord | None:
        """End a replica that nobody calls, with proof; what is left of it is listed and fenced."""
        members = await self.ask_group("members")
        if members.fence is None:
            raise fail(UNCONFIRMED, f"{members.spec.model} has no grant to stop a replica under")
        left = await clear(
            record, self.start.run, members.spec, members.fence, self.next_id("stop")
        )
        await self.settle(record.replica, left)
        return left

    async def _take_back(self, replica: int) -> None:
        """The answer was lost that it is routed already."""
        members = await self.ask_role("leave", replica=replica)
        if members.failure is not None:
            raise fail(UNCONFIRMED, f"it answers and could not be taken back: {members.why}")

    async def settle(self, replica: int, left: OutsiderRecord | None) -> None:
        await self.ask_group("settle", replica=replica, record=left)

    async def roll_back(
        self,
        replica: int,
        placement: AddedReplica | None,
        failure: ScaleFailure,
        why: str | None,
    ) -> None:
        """A replica that was not to be: nothing of it is left, or it is listed and fenced."""
        record = OutsiderRecord(
            replica=replica,
            stage="left",
            operation=self.request.operation_id,
            placement=placement,
            stopped=placement is None,
            drained=True,
            why=why,
        )
        self.row(replica, failure=failure, why=why)
        try:
            if replica in (await self.ask_group("members")).spec.numbers:
                await self._take_back(replica)
            left = await self.end(record)
        except FailureError as error:
            self.row(replica, outcome="left", why=f"{why}; {text_of(error)}")
            return
        if left is None:
            self.row(replica, outcome="failed")
        else:
            self.row(replica, outcome="left", why=f"{why}; {left.failure}: {left.why}")
