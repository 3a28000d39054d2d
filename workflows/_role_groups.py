"""The engine groups of one role: what each has become, and what is asked of all of them."""

import asyncio
from typing import Any

from temporalio import workflow

from relax_infer.contracts.engines import EngineGroupSpec, GroupSnapshot
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import LifecycleInput, RoleInput, RoleOperation, RoleResult
from relax_infer.contracts.scale import MemberAsk, Members
from relax_infer.machines import GROUP, GroupState, ReplicaState
from workflows._group_gone import end_engines
from workflows._lasting import begin_lasting
from workflows._mailbox import Mailbox, NobodyThere
from workflows._visible import attributes

PATIENT = {"ready": 604_800.0, "recover": 604_800.0}
"""Seconds that an engine group may take for what ends with its recoveries: these have deadlines of
their own, and one that waits for proof waits for a person."""


class RoleGroups:
    """Knows every group as it was told last; asks them in the role's name.

    Args:
        mail: the role's.
        carried: what :meth:`carry` gave before a continue-as-new.
        fence: of the last operation then.
    """

    def __init__(
        self,
        start: RoleInput,
        mail: Mailbox,
        carried: list[dict[str, Any]] | None = None,
        fence: dict[str, Any] | None = None,
    ) -> None:
        self._start, self._mail = start, mail
        self.fence = FenceToken.model_validate(fence) if fence else None
        """Of the last operation under the lease; None: there was none that is known."""
        self._known = {
            g.model: GroupSnapshot(
                role=g.role, model=g.model, state=GROUP.initial, weight_source=g.weight_source
            )
            for g in start.groups
        }
        for document in carried or []:
            snapshot = GroupSnapshot.model_validate(document)
            self._known[snapshot.model] = snapshot

    def carry(self) -> list[dict[str, Any]]:
        return [g.model_dump(mode="json") for g in self._known.values()]

    async def begin(self) -> None:
        """Start the workflow of each."""
        for group in self._start.groups:
            await self._begin(group)

    async def _begin(self, group: EngineGroupSpec) -> None:
        run = self._start.run.run
        await begin_lasting(
            "EngineLifecycle",
            LifecycleInput(
                run=self._start.run, group=group, operation_timeout=self._start.operation_timeout
            ),
            id=self._id(group.model),
            search_attributes=attributes(run=run, role=group.role),
            summary=f"{group.role} engines of {run}: {group.replicas} x {group.model}",
            patient=self._start.restarts > 0,
        )

    def _id(self, model: str) -> str:
        return f"{self._start.run.run}.{self._start.role}.{model}"

    # --- known

    @property
    def all(self) -> tuple[GroupSnapshot, ...]:
        return tuple(self._known.values())

    def of(self, model: str) -> GroupSnapshot:
        return self._known[model]

    def hear(self, snapshot: GroupSnapshot) -> GroupSnapshot | None:
        """Take in what a group says of itself; what was known before, None if this is no news: it
        is no group of ours, or a later word overtook it."""
        known = self._known.get(snapshot.model)
        if known is None or snapshot.number < known.number:
            return None
        self._known[snapshot.model] = snapshot
        return known

    def _learn(self, told: GroupSnapshot | None) -> None:
        """What an answer says that a group has become, unless a later word was here before it."""
        if told is not None and told.number > self._known[told.model].number:
            self._known[told.model] = told

    def close(self, group_state: GroupState, replica_state: ReplicaState) -> None:
        """Show what is READY as it will be, before anything of it lets go or changes."""
        for model, group in self._known.items():
            if group.state is GroupState.READY:
                closed = tuple(
                    r.model_copy(update={"state": replica_state, "base_url": None})
                    if r.state is ReplicaState.READY
                    else r
                    for r in group.replicas
                )
                self._known[model] = group.model_copy(
                    update={"state": group_state, "replicas": closed}
                )

    # --- asked

    async def operate(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Have every engine group do it; all must succeed, none is left unawaited."""
        self.fence = operation.fence or self.fence
        outcomes = await asyncio.gather(
            *(self._ask(group, operation, operation_id) for group in self._start.groups),
            return_exceptions=True,
        )
        results: list[RoleResult] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return _together(results)

    async def _ask(
        self, group: EngineGroupSpec, operation: RoleOperation, operation_id: str
    ) -> RoleResult:
        try:
            result = await self._mail.ask(
                self._id(group.model),
                operation.method,
                operation,
                RoleResult,
                operation_id=f"{operation_id}@{group.model}",
                timeout=PATIENT.get(operation.method, self._start.operation_timeout),
            )
        except NobodyThere:  # ended by hand
            if operation.method not in ("resolve", "stop"):
                raise
            if self.fence is None:  # what was asked for is known to have led to nothing, or unknown
                if self._known[group.model].state is not GroupState.STOPPED:
                    raise
                return RoleResult(state=GroupState.STOPPED)
            return await end_engines(group, self.fence, operation.word)
        self._learn(result.snapshot)
        return result

    async def ask_members(self, ask: MemberAsk, operation_id: str) -> Members:
        """Something of one model's replicas, which a scale operation wants."""
        members = await self._mail.ask(
            self._id(ask.model),
            ask.method,
            ask,
            Members,
            operation_id=operation_id,
            timeout=ask.timeout + self._start.operation_timeout,
        )
        self._learn(members.snapshot)
        return members

    async def weights_of(self, model: str) -> Members:
        ask = MemberAsk(method="members", model=model, operation="externals")
        return await self.ask_members(ask, f"{workflow.uuid4()}")


def _together(results: list[RoleResult]) -> RoleResult:
    """What all of them say as one role's word; where they differ, nothing."""
    versions = {r.weight_version for r in results}
    digests = {r.weights_digest for r in results}
    states = {r.state for r in results}
    return RoleResult(
        evidence=tuple(e for r in results for e in r.evidence),
        holders=tuple(h for r in results for h in r.holders),
        weight_version=versions.pop() if len(versions) == 1 else None,
        weights_digest=digests.pop() if len(digests) == 1 else None,
        state=_state_of(states),
        why="; ".join(r.why for r in results if r.why is not None) or None,
    )


def _state_of(states: set[str]) -> str:
    if len(states) == 1:
        return states.pop()
    return "SLEEPING" if states <= {"SLEEPING", "STOPPED"} else "BLOCKED"
