"""The scale operations of one role: one at work for each model; the last ones are remembered."""

import asyncio
from contextlib import suppress
from typing import Any

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, ChildWorkflowError, FailureError

from relax_infer.contracts.counted import counted
from relax_infer.contracts.lease import RoleInput
from relax_infer.contracts.scale import (
    MemberAsk,
    Members,
    ScaleInput,
    ScaleRequest,
    ScaleStatus,
)
from relax_infer.machines import SCALE
from workflows._failures import text_of
from workflows._mailbox import Mailbox
from workflows._visible import attributes

REMEMBERED = 100
GOING_DOWN = "{role} shutdown has started"


class _Operation:
    def __init__(self, fingerprint: str, status: ScaleStatus) -> None:
        self.fingerprint, self.status = fingerprint, status
        self.task: asyncio.Task[None] | None = None
        self.gives_way: str | None = None
        """Why it is to end before it has reached what it was for."""


class ScaleDesk:
    """Takes requests in, has ScaleRole carry them out, and knows how each ended."""

    def __init__(self, start: RoleInput, mail: Mailbox, carried: list[Any] | None = None) -> None:
        self._start, self._mail = start, mail
        self._known: dict[str, _Operation] = {}
        for fingerprint, document in carried or []:
            status = ScaleStatus.model_validate(document)
            self._known[status.operation_id] = _Operation(fingerprint, status)
        self.closing = False
        """The role is going down."""
        self.begun: dict[str, int] = {}
        """Operations of each model that were taken in, dry runs apart; for whoever wants to know
        whether one was meanwhile."""

    @property
    def at_work(self) -> list[ScaleStatus]:
        return [each.status for each in self._known.values() if not each.status.ended]

    @property
    def all(self) -> list[ScaleStatus]:
        """Oldest first."""
        return [each.status for each in self._known.values()]

    def carry(self) -> list[Any]:
        """For continue-as-new, when none is at work."""
        return [
            [each.fingerprint, each.status.model_dump(mode="json")] for each in self._known.values()
        ]

    # --- what may happen

    def check(self, request: ScaleRequest) -> None:
        """Raise ValueError with the reason unless the request is legal now."""
        known = self._known.get(request.operation_id)
        if known is not None:
            if known.fingerprint != request.fingerprint:
                raise ValueError(
                    f"operation {request.operation_id} asked for something else:"
                    f" {known.fingerprint}; choose another id for {request.fingerprint}"
                )
            return
        role = self._start.role
        if self.closing:
            raise ValueError(GOING_DOWN.format(role=role.capitalize()))
        model = self._model(request)
        if self._start.shares_with and request.engine_urls and request.direction == "out":
            raise ValueError(
                f"{role} takes turns on its GPUs with {', '.join(self._start.shares_with)} (defer"
                " or split): an engine that others started has no fence, so nobody could prove that"
                " it has let go of its GPUs before the next role loads. Use mode decoupled, or stop"
                " that engine and ask for num_replicas"
            )
        if self._start.shares_with:
            raise ValueError(
                f"{role} shares its GPUs with {', '.join(self._start.shares_with)} and takes turns"
                " with them (defer or split): a replica on GPUs of its own would have none. Give"
                " the role GPUs that nobody else uses (mode: decoupled)"
            )
        for other in self.at_work:
            if other.model == model and not _makes_way(other, request):
                raise ValueError(
                    f"CONFLICT: operation {other.operation_id} is at work on {model}"
                    f" ({other.state}); it ends by itself, then ask again"
                )

    def _model(self, request: ScaleRequest) -> str:
        models = [group.model for group in self._start.groups]
        if request.model is None and len(models) == 1:
            return models[0]
        if request.model not in models:
            raise ValueError(
                f"{self._start.role} has no model {request.model}: name one of {', '.join(models)}"
            )
        assert request.model is not None
        return request.model

    # --- one operation

    def gave_way(self, operation_id: str) -> bool:
        """Whether it had to end for the sake of another."""
        return self._known[operation_id].gives_way is not None

    async def perform(self, request: ScaleRequest) -> ScaleStatus:
        """Carry it out once; the same id joins it or gets its result."""
        known = self._known.get(request.operation_id) or self._begin(request)
        operation = known
        if request.wait:
            await workflow.wait_condition(lambda: operation.status.ended)
        return operation.status

    def _begin(self, request: ScaleRequest) -> _Operation:
        start = self._start
        status = ScaleStatus(
            operation_id=request.operation_id,
            run=start.run.run,
            role=start.role,
            model=self._model(request),
            state=SCALE.initial,
            direction=request.direction,
            target=request.num_replicas,
            dry_run=request.dry_run,
            by=request.by,
            reason=request.reason,
        )
        if not request.dry_run:
            self.begun[status.model] = self.begun.get(status.model, 0) + 1
        operation = _Operation(request.fingerprint, status)
        self._known[request.operation_id] = operation
        operation.task = asyncio.create_task(self._follow(operation, request))
        return operation

    async def _follow(self, operation: _Operation, request: ScaleRequest) -> None:
        start, model = self._start, operation.status.model
        try:
            if others := self._others(operation):
                await self._clear_the_way(others, request.operation_id)
            handle = await workflow.start_child_workflow(
                "ScaleRole",
                ScaleInput(
                    run=start.run,
                    role=start.role,
                    model=model,
                    request=request,
                    operation_timeout=start.operation_timeout,
                ),
                id=self._id(request.operation_id),
                result_type=ScaleStatus,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                search_attributes=attributes(run=start.run.run, role=start.role),
                static_summary=f"{model}: {_wanted(request)}",
            )
            with suppress(ApplicationError):  # it has ended already
                if self.closing:
                    going_down = GOING_DOWN.format(role=start.role.capitalize())
                    await handle.signal("wind_down", going_down)
                if operation.gives_way is not None:
                    await handle.signal("give_way", operation.gives_way)
            operation.status = await handle
        except (ChildWorkflowError, FailureError) as error:
            # Somebody ended it from outside, or its id was used before the role began anew.
            await self._abandon(operation, text_of(error))
        self._forget_old()

    def _others(self, operation: _Operation) -> list[_Operation]:
        """Operations at work on the same model, that began before."""
        model = operation.status.model
        known = [each for each in self._known.values() if each is not operation]
        return [each for each in known if each.status.model == model and not each.status.ended]

    async def _clear_the_way(self, others: list[_Operation], operation_id: str) -> None:
        """What a policy has at work ends before what a person asked for begins."""
        why = f"operation {operation_id} of a person takes over"
        for other in others:
            other.gives_way = why
            handle = workflow.get_external_workflow_handle(self._id(other.status.operation_id))
            try:
                await handle.signal("give_way", why)
            except FailureError as error:  # it is not there yet, or not any more
                workflow.logger.warning("%s: %s", other.status.operation_id, text_of(error))
        await workflow.wait_condition(lambda: all(each.status.ended for each in others))

    async def _abandon(self, operation: _Operation, why: str) -> None:
        """What it had in hand is listed as left: another operation may finish it."""
        status = operation.status
        ask = MemberAsk(method="abandon", model=status.model, operation=status.operation_id)
        group = f"{self._start.run.run}.{self._start.role}.{status.model}"
        try:
            await self._mail.ask(
                group, "abandon", ask, Members, operation_id=f"{workflow.uuid4()}", timeout=60.0
            )
        except FailureError as error:
            why = f"{why}; {text_of(error)}"
        operation.status = status.model_copy(update={"ended": True, "why": why})

    def heard(self, status: ScaleStatus) -> None:
        """Where an operation at work stands."""
        operation = self._known.get(status.operation_id)
        if operation is not None and not operation.status.ended:
            operation.status = status

    async def wind_down(self) -> None:
        """The role is going down: what is at work comes to its end first."""
        self.closing = True
        for status in self.at_work:
            role = self._start.role.capitalize()
            handle = workflow.get_external_workflow_handle(self._id(status.operation_id))
            try:
                await handle.signal("wind_down", GOING_DOWN.format(role=role))
            except FailureError as error:
                workflow.logger.warning("%s: %s", status.operation_id, text_of(error))
        if self.at_work:
            await workflow.wait_condition(lambda: not self.at_work)

    def _id(self, operation_id: str) -> str:
        return f"{self._start.run.run}.{self._start.role}.scale-{operation_id}"

    def _forget_old(self) -> None:
        ended = [key for key, each in self._known.items() if each.status.ended]
        for key in ended[: max(0, len(ended) - REMEMBERED)]:
            del self._known[key]


def _wanted(request: ScaleRequest) -> str:
    """In the words of the web UI."""
    if request.num_replicas is None:
        return ", ".join(request.engine_urls)
    return counted(request.num_replicas, "replica")


def _makes_way(other: ScaleStatus, request: ScaleRequest) -> bool:
    return other.by == "policy" and request.by == "person" and not request.dry_run
