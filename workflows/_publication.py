"""What callers of a role see: its registry, which router and gateway are brought to."""

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.batch import RegistryPush
from relax_infer.contracts.lease import RoleInput
from relax_infer.contracts.run import FrontAddress
from relax_infer.discovery import InferenceRegistry
from workflows._calls import ENSURE_FRONT, PUSH_REGISTRY
from workflows._externals import Externals
from workflows._failures import text_of
from workflows._registry import models_of, router_workers, routing_of
from workflows._role_groups import RoleGroups

PAUSE = 5.0
"""Seconds before what could not be published is tried again."""


class Publication:
    """The registry lives here; the gateway is pushed to, and asks for it when it starts empty.

    Args:
        term: of the role's incarnation; a push of an earlier one is refused.
        front: what :meth:`carry` gave before a continue-as-new.
    """

    def __init__(
        self,
        start: RoleInput,
        term: int,
        groups: RoleGroups,
        externals: Externals,
        front: dict[str, Any] | None = None,
    ) -> None:
        self._start, self._groups, self._externals = start, groups, externals
        self.term = term
        self.behind = False
        """Whether something changed by itself since the last publication."""
        self._front = None if front is None else FrontAddress.model_validate(front)
        self._registry = InferenceRegistry(start.role, registry_epoch=str(workflow.uuid4()))

    def carry(self) -> dict[str, Any] | None:
        """Without the router's address the next history's first document would route nowhere."""
        return None if self._front is None else self._front.model_dump(mode="json")

    def begin(self) -> None:
        """The first document, of which nobody is told; who asks is given it."""
        self._registry.publish(self._models(), routing=routing_of(self._start.groups))

    def document(self) -> dict[str, Any]:
        """The role's schema 2 document."""
        return self._registry.snapshot()

    async def publish(self) -> None:
        """Bring registry, router and gateway to what the groups are."""
        self.behind = False
        if self._front is None:
            self._front = await ENSURE_FRONT(self._start.run, summary="router and gateway")
        routed = self._start.role == "rollout"
        while True:
            front = await PUSH_REGISTRY(
                RegistryPush(
                    run=self._start.run,
                    role=self._start.role,
                    term=self.term,
                    document=self._registry.publish(self._models()),
                    router_workers=router_workers(self._groups.all) if routed else None,
                    router_others=self._externals.workers() if routed else None,
                ),
                summary=f"publish {self._start.role}",
            )
            if front == self._front:
                return
            self._front = front  # it had to move; the document names the router's address

    async def keep_up(self, turn: asyncio.Lock, show: Callable[[], None]) -> None:
        """Publish what changes by itself, under the role's turn, until it is cancelled."""
        while True:
            await workflow.wait_condition(lambda: self.behind)
            refused = None
            async with turn:
                if self.behind:
                    try:
                        await self.publish()
                    except ActivityError as error:
                        refused = error
            show()
            if refused is not None:
                workflow.logger.error("cannot publish: %s", text_of(refused))
                self.behind = True
                await workflow.sleep(PAUSE)

    def _models(self) -> list[Any]:
        router = self._front.router_url if self._front else None
        return models_of(self._groups.all, router, self._externals.callable)
