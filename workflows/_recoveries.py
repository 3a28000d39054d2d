"""The recoveries of one engine group: children that may outlast the operation that began them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError, ChildWorkflowError

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.recovery import RecoveryInput, RecoveryNote, RecoveryResult
from relax_infer.machines import RecoveryState
from workflows._failures import UNCONFIRMED, fail, text_of
from workflows._visible import attributes

Handle = workflow.ChildWorkflowHandle[Any, RecoveryResult]


class _Recovery:
    handle: Handle
    """Set once the child has been started."""

    def __init__(self, child: str) -> None:
        self.child = child
        self.note: RecoveryNote | None = None
        self.late: asyncio.Task[None] | None = None

    @property
    def why_blocked(self) -> str | None:
        note = self.note
        if note is None or note.state is not RecoveryState.BLOCKED:
            return None
        return note.why or "its release is not proved"


class Recoveries:
    """At most one per replica. The result of each is taken exactly once."""

    def __init__(self, spec: EngineGroupSpec, made: int) -> None:
        self._spec = spec
        self._at_work: dict[int, _Recovery] = {}
        self._ended_by_hand: dict[int, str] = {}
        """Why nobody takes care of a replica any more."""
        self.made = made
        """Recoveries ever begun in the group; numbers their workflow ids."""

    def __contains__(self, replica: int) -> bool:
        return replica in self._at_work

    def __bool__(self) -> bool:
        return bool(self._at_work)

    @property
    def moving(self) -> bool:
        """Whether one is at work that is not BLOCKED."""
        return any(recovery.why_blocked is None for recovery in self._at_work.values())

    async def begin(self, start: RecoveryInput) -> None:
        spec = self._spec
        self.made += 1
        self._ended_by_hand.pop(start.replica, None)
        child = f"{spec.run}.{spec.role}.{spec.model}.replica-{start.replica}.recovery-{self.made}"
        # Known before it is started: its first note may come with the news of its start.
        recovery = self._at_work[start.replica] = _Recovery(child)
        recovery.handle = await workflow.start_child_workflow(
            "ReplicaRecovery",
            start,
            id=child,
            result_type=RecoveryResult,
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            search_attributes=attributes(run=spec.run, role=spec.role),
            static_summary=f"{spec.engine_id(start.replica)}: {start.cause}"[:200],
        )

    def note(self, note: RecoveryNote) -> bool:
        """Remember what a recovery says of itself; False if it is over."""
        if (recovery := self._at_work.get(note.replica)) is None:
            return False
        recovery.note = note
        return True

    async def end_or_block(
        self, replica: int, late: Callable[[int], Awaitable[None]]
    ) -> RecoveryResult | None:
        """Its result; None when it is BLOCKED: then ``late`` is called once it has ended."""
        recovery = self._at_work[replica]
        handle = recovery.handle
        await workflow.wait_condition(lambda: handle.done() or recovery.why_blocked is not None)
        if handle.done():
            return await self.take(replica)

        async def hear() -> None:
            await workflow.wait_condition(handle.done)
            await late(replica)

        recovery.late = asyncio.create_task(hear())
        return None

    async def take(self, replica: int) -> RecoveryResult:
        """The result of one that has ended; the replica has none at work any more.

        Raises an ApplicationError of type Unconfirmed if somebody ended the workflow itself.
        """
        recovery = self._at_work.pop(replica)
        try:
            return await recovery.handle
        except ChildWorkflowError as error:
            why = f"{recovery.child} was ended: {text_of(error)}"
            self._ended_by_hand[replica] = why
            raise fail(UNCONFIRMED, why) from error

    async def resolve(self, replica: int, word: str) -> RecoveryResult:
        """Give a person's word to a BLOCKED one."""
        handle = self._at_work[replica].handle
        with suppress(ApplicationError):  # it ended a moment ago, by a proof of its own
            await handle.signal("resolve", word)
        await workflow.wait_condition(handle.done)
        return await self.take(replica)

    async def look_again(self) -> None:
        """Have the BLOCKED ones try their proof now."""
        for recovery in list(self._at_work.values()):
            if recovery.why_blocked is not None and not recovery.handle.done():
                with suppress(ApplicationError):  # likewise
                    await recovery.handle.signal("look_again")

    def blocked(self, failed: Iterable[int]) -> str | None:
        """What waits for proof or for a person, in words.

        Args:
            failed: the replicas of which it is not known where they stand.
        """
        waits = {
            replica: recovery.why_blocked
            for replica, recovery in self._at_work.items()
            if recovery.why_blocked is not None
        }
        waits |= {k: self._ended_by_hand[k] for k in failed if k in self._ended_by_hand}
        told = (f"{self._spec.engine_id(replica)}: {why}" for replica, why in waits.items())
        return "; ".join(told) or None

    def rows(self) -> list[tuple[str, str]]:
        """For the details in the web UI."""
        return [
            (recovery.child, str(recovery.note.state) if recovery.note else "begins")
            for recovery in self._at_work.values()
        ]
