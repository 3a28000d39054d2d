"""What of a scale operation a role has to publish: who comes, and who goes."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.scale import MemberAsk, Members, ScaleFailure
from workflows._externals import Externals
from workflows._failures import PERMANENT, fail, text_of

GROUP_SECONDS = 30.0
"""For an engine group whose role has nothing else at work to have its turn."""


class RoleMembers:
    """Under the role's turn, so that the lease's operations come before or after, never between.

    Args:
        turn: the role's.
        is_ready: whether a model's group is READY.
        is_closing: whether the role is going down.
        ask_group: ask the model's engine group, under an operation id.
        publish: bring registry, router and gateway to what the groups are.
        externals: engines of others that the role calls.
    """

    def __init__(
        self,
        turn: asyncio.Lock,
        is_ready: Callable[[str], bool],
        is_closing: Callable[[], bool],
        ask_group: Callable[[MemberAsk, str], Awaitable[Members]],
        publish: Callable[[], Awaitable[None]],
        externals: Externals,
    ) -> None:
        self._turn, self._is_ready, self._is_closing = turn, is_ready, is_closing
        self._ask_group, self._publish = ask_group, publish
        self._externals = externals

    async def step(self, ask: MemberAsk, operation_id: str) -> Members:
        match ask.method:
            case "adopt":
                return await self._adopt(ask, operation_id)
            case "leave":
                return await self._leave(ask, operation_id)
            case "externals":
                return await self._told(ask, operation_id)
            case "adopt_external":
                return await self._adopt_external(ask, operation_id)
            case "release_external":
                return await self._release_external(ask, operation_id)
            case _:
                raise fail(PERMANENT, f"a role cannot {ask.method}: its engine group can")

    async def _adopt(self, ask: MemberAsk, operation_id: str) -> Members:
        assert ask.placement is not None
        await self._quiet(lambda: self._is_ready(ask.model), ask.timeout)
        async with self._turn:
            if self._is_closing():
                return await self._as_it_is(ask, operation_id, "the role is going down")
            members = await self._ask_group(ask, operation_id)
            if members.failure is not None:
                return members
            try:
                await self._publish()
            except ActivityError as error:
                gone = await self._ask_group(
                    _as(ask, "leave", ask.placement.replica), f"{operation_id}.leave"
                )
                return _failed(gone, ScaleFailure.ROUTER_REGISTRATION_FAILED, text_of(error))
        return members

    async def _leave(self, ask: MemberAsk, operation_id: str) -> Members:
        if not await self._quiet(lambda: True, ask.timeout):
            why = f"the role was at work for {ask.timeout:g} s"
            return await self._as_it_is(ask, operation_id, why)
        async with self._turn:
            members = await self._ask_group(
                ask.model_copy(update={"timeout": GROUP_SECONDS}), operation_id
            )
            if members.failure is not None:
                return members
            try:
                await self._publish()
            except ActivityError as error:
                stays = await self._ask_group(_as(ask, "stay", ask.replica), f"{operation_id}.stay")
                return _failed(stays, ScaleFailure.ROUTER_REMOVAL_FAILED, text_of(error))
        return members

    async def _told(self, ask: MemberAsk, operation_id: str) -> Members:
        members = await self._ask_group(_as(ask, "members", None), f"{operation_id}.members")
        return members.model_copy(update={"externals": self._externals.of(ask.model)})

    async def _adopt_external(self, ask: MemberAsk, operation_id: str) -> Members:
        """Named to callers if it still holds what the model's own engines hold."""
        engine = ask.external
        assert engine is not None
        await self._quiet(lambda: self._is_ready(ask.model), ask.timeout)
        async with self._turn:
            told = await self._told(ask, operation_id)
            if self._is_closing():
                return _failed(told, ScaleFailure.UNKNOWN, "the role is going down")
            before = self._externals.forget(engine.url)
            self._externals.put(engine)
            if engine not in self._externals.callable(ask.model):
                self._put_back(engine, before)
                why = "the weights of its group have changed meanwhile"
                return _failed(told, ScaleFailure.WEIGHT_UPDATE_RUNNING, why)
            try:
                await self._publish()
            except ActivityError as error:
                self._put_back(engine, before)
                return _failed(told, ScaleFailure.ROUTER_REGISTRATION_FAILED, text_of(error))
        return await self._told(ask, f"{operation_id}.after")

    def _put_back(self, engine: ExternalEngine, before: ExternalEngine | None) -> None:
        self._externals.forget(engine.url)
        if before is not None:
            self._externals.put(before)

    async def _release_external(self, ask: MemberAsk, operation_id: str) -> Members:
        """Nobody of ours calls it any more, by router and gateway; it goes on as it is."""
        assert ask.external is not None
        async with self._turn:
            engine = self._externals.forget(ask.external.url)
            try:
                await self._publish()
            except ActivityError as error:
                if engine is not None:
                    self._externals.put(engine)
                told = await self._told(ask, operation_id)
                return _failed(told, ScaleFailure.ROUTER_REMOVAL_FAILED, text_of(error))
        return await self._told(ask, operation_id)

    async def _quiet(self, condition: Callable[[], bool], seconds: float) -> bool:
        def quiet() -> bool:
            return self._is_closing() or (not self._turn.locked() and condition())

        try:
            await workflow.wait_condition(quiet, timeout=timedelta(seconds=seconds))
        except TimeoutError:
            return False
        return True

    async def _as_it_is(self, ask: MemberAsk, operation_id: str, why: str) -> Members:
        members = await self._ask_group(_as(ask, "members", None), f"{operation_id}.members")
        return _failed(members, ScaleFailure.WEIGHT_UPDATE_RUNNING, why)


def _as(ask: MemberAsk, method: str, replica: int | None) -> MemberAsk:
    return MemberAsk.model_validate(
        {"method": method, "model": ask.model, "operation": ask.operation, "replica": replica}
    )


def _failed(members: Members, failure: ScaleFailure, why: str) -> Members:
    return members.model_copy(update={"failure": failure, "why": why})
