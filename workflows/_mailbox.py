"""How workflows ask each other: a signal out, a signal back, and both sides remember the id.

A workflow cannot send an update to another. So an operation is a signal ``ask`` that carries an
operation id and the asker's workflow id (no run id: it survives continue-as-new), and the answer is
a signal ``answer``. The same operation asked again joins the one at work or gets the same answer.
"""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import BaseModel
from temporalio import workflow
from temporalio.exceptions import ApplicationError, FailureError

from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.machines import IllegalTransition
from workflows._failures import UNCONFIRMED, fail, kind_of, text_of

T = TypeVar("T", bound=BaseModel)
Handler = Callable[[Ask], Awaitable[BaseModel]]

_REMEMBERED = 2048


class Mailbox:
    """One per workflow. Not thread-safe: a workflow has one thread."""

    def __init__(self, carried: list[dict[str, Any]] | None = None) -> None:
        self._expected: dict[str, Answer | None] = {}
        self._given: dict[str, Answer] = {}
        self._at_work: dict[str, list[str]] = {}
        for document in carried or []:
            answer = Answer.model_validate(document)
            self._given[answer.operation_id] = answer

    async def ask(
        self,
        workflow_id: str,
        method: str,
        payload: BaseModel,
        gives: type[T],
        *,
        operation_id: str,
        timeout: float | None = None,
    ) -> T:
        """The other workflow's answer.

        Raises an ApplicationError whose type is the kind of failure; Unconfirmed when no answer
        came within ``timeout`` seconds. An answer that comes later is dropped.
        """
        self._expected[operation_id] = None
        try:
            await workflow.get_external_workflow_handle(workflow_id).signal(
                "ask",
                Ask(
                    operation_id=operation_id,
                    asker=workflow.info().workflow_id,
                    method=method,
                    payload=payload.model_dump(mode="json"),
                ),
            )
            await workflow.wait_condition(
                lambda: self._expected[operation_id] is not None,
                timeout=timedelta(seconds=timeout) if timeout else None,
                timeout_summary=f"answer of {workflow_id} to {method}",
            )
        except TimeoutError:
            raise fail(
                UNCONFIRMED, f"{workflow_id} did not answer {method} within {timeout:.0f} s"
            ) from None
        except FailureError as error:
            raise fail(UNCONFIRMED, f"{workflow_id} cannot be asked to {method}: {error}") from None
        finally:
            answer = self._expected.pop(operation_id)
        assert answer is not None
        if not answer.ok:
            raise fail(answer.kind, answer.error)
        return gives.model_validate(answer.result)

    def deliver(self, answer: Answer) -> bool:
        """Take in a signal ``answer``; one that nobody waits for is dropped: False."""
        if awaited := answer.operation_id in self._expected:
            self._expected[answer.operation_id] = answer
        return awaited

    async def serve(self, ask: Ask, handler: Handler) -> None:
        """Carry out a signal ``ask`` once, and answer everyone who asked."""
        if ask.operation_id in self._at_work:
            self._at_work[ask.operation_id].append(ask.asker)
            return
        answer = self._given.get(ask.operation_id)
        askers = self._at_work[ask.operation_id] = [ask.asker]
        if answer is None:
            answer = await self._carry_out(ask, handler)
            self._given[ask.operation_id] = answer
            while len(self._given) > _REMEMBERED:
                del self._given[next(iter(self._given))]
        del self._at_work[ask.operation_id]
        for asker in dict.fromkeys(askers):
            await self._send(asker, answer)

    @staticmethod
    async def _carry_out(ask: Ask, handler: Handler) -> Answer:
        try:
            result = await handler(ask)
        except (FailureError, IllegalTransition, ValueError) as error:
            return Answer(
                operation_id=ask.operation_id,
                ok=False,
                kind=kind_of(error),
                error=text_of(error),
            )
        return Answer(operation_id=ask.operation_id, ok=True, result=result.model_dump(mode="json"))

    @staticmethod
    async def _send(asker: str, answer: Answer) -> None:
        try:
            await workflow.get_external_workflow_handle(asker).signal("answer", answer)
        except ApplicationError as error:
            workflow.logger.warning("%s is gone; its answer is kept: %s", asker, error)

    def carry(self) -> list[dict[str, Any]]:
        """The answers given, for continue-as-new; legal only when nothing is at work."""
        return [answer.model_dump(mode="json") for answer in self._given.values()]
