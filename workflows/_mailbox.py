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
from workflows._older import DONE, FAILED, Older, newest_within, what_is_left

T = TypeVar("T", bound=BaseModel)
Handler = Callable[[Ask], Awaitable[BaseModel]]

AGAIN, AGAIN_AT_LEAST = 30.0, 3600.0
"""Seconds after which an ask without an answer is sent again: at first, and at most."""
_REMEMBERED = 2048
_NEWS = "snapshot"
"""Of a result: what the one who answered had become by then. It is large, and out of date when the
same is asked again."""


class NobodyThere(ApplicationError):
    """The workflow that was asked does not exist, or has ended: nothing was carried out."""

    def __init__(self, message: str) -> None:
        super().__init__(message, type=UNCONFIRMED, non_retryable=True)


class Mailbox:
    """One per workflow. Not thread-safe: a workflow has one thread.

    Of answers from before a continue-as-new only the newest are whole; see
    :mod:`workflows._older`.

    Args:
        carried: what :meth:`carry` gave before a continue-as-new.
        remembers: whether answers are kept for who asks again; False where the handler itself does
            nothing twice.
    """

    def __init__(self, carried: dict[str, Any] | None = None, *, remembers: bool = True) -> None:
        self._expected: dict[str, Answer | None] = {}
        self._given: dict[str, Answer] = {}
        self._at_work: dict[str, list[str]] = {}
        self._remembers = remembers
        carried = carried or {"older": "", "full": []}
        self._older = Older(carried["older"])
        for document in carried["full"]:
            self._remember(Answer.model_validate(document))

    async def ask(
        self,
        workflow_id: str,
        method: str,
        payload: BaseModel,
        gives: type[T],
        *,
        operation_id: str,
        timeout: float | None = None,
        again: bool = False,
    ) -> T:
        """The other workflow's answer.

        With ``again`` and without a timeout the same is asked again from time to time, so that
        an end of the other workflow is noticed.

        Raises an ApplicationError whose type is the kind of failure; Unconfirmed when no answer
        came within ``timeout`` seconds, and :class:`NobodyThere` when nobody can answer. An answer
        that comes later is dropped.
        """
        self._expected[operation_id] = None
        ask = Ask(
            operation_id=operation_id,
            asker=workflow.info().workflow_id,
            method=method,
            payload=payload.model_dump(mode="json"),
        )
        other = workflow.get_external_workflow_handle(workflow_id)
        pause = AGAIN if again and timeout is None else None
        try:
            await other.signal("ask", ask)
            while not await self._answered_within(pause or timeout, ask, workflow_id):
                if pause is None:
                    raise TimeoutError
                pause = min(2 * pause, AGAIN_AT_LEAST)
                await other.signal("ask", ask)
        except TimeoutError:
            raise fail(
                UNCONFIRMED, f"{workflow_id} did not answer {method} within {timeout:.0f} s"
            ) from None
        except ApplicationError as error:
            raise NobodyThere(f"{workflow_id} cannot be asked to {method}: {error}") from None
        except FailureError as error:
            raise fail(UNCONFIRMED, f"{workflow_id} cannot be asked to {method}: {error}") from None
        finally:
            answer = self._expected.pop(operation_id)
        assert answer is not None
        if not answer.ok:
            raise fail(answer.kind, answer.error)
        return gives.model_validate(answer.result)

    async def _answered_within(self, seconds: float | None, ask: Ask, other: str) -> bool:
        try:
            await workflow.wait_condition(
                lambda: self._expected[ask.operation_id] is not None,
                timeout=timedelta(seconds=seconds) if seconds else None,
                timeout_summary=f"answer of {other} to {ask.method}",
            )
        except TimeoutError:
            return False
        return True

    def deliver(self, answer: Answer) -> bool:
        """Take in a signal ``answer``; one that nobody waits for is dropped: False."""
        if awaited := answer.operation_id in self._expected:
            self._expected[answer.operation_id] = answer
        return awaited

    async def serve(
        self,
        ask: Ask,
        handler: Handler,
        renew: Callable[[Answer], Answer] | None = None,
    ) -> None:
        """Carry out a signal ``ask`` once, and answer everyone who asked.

        ``renew`` is given what was remembered of an answer, and gives what is sent to who asks
        again.
        """
        if ask.operation_id in self._at_work:
            self._at_work[ask.operation_id].append(ask.asker)
            return
        answer = self._answered(ask.operation_id)
        askers = self._at_work[ask.operation_id] = [ask.asker]
        if answer is None:
            answer = await self._carry_out(ask, handler)
            self._remember(answer)
        elif renew is not None and answer.ok:
            answer = renew(answer)
        del self._at_work[ask.operation_id]
        for asker in dict.fromkeys(askers):
            await self._send(asker, answer)

    def _answered(self, operation_id: str) -> Answer | None:
        """What was answered, or what is left of it; None: nothing that is known."""
        if (whole := self._given.get(operation_id)) is not None:
            return whole
        if (outcome := self._older.outcome(operation_id)) is None:
            return None
        kind, text = what_is_left(operation_id, outcome)
        # Who asks did not hear what came of it; it was done, so nothing may be built on a refusal.
        kind = UNCONFIRMED if outcome == DONE else kind
        return Answer(operation_id=operation_id, ok=False, kind=kind, error=text)

    def _remember(self, answer: Answer) -> None:
        if not self._remembers:
            return
        if answer.result.get(_NEWS) is not None:
            lasting = {k: v for k, v in answer.result.items() if k != _NEWS}
            answer = answer.model_copy(update={"result": lasting})
        self._given[answer.operation_id] = answer
        self._older.drop(len(self._older) + len(self._given) - _REMEMBERED)
        while len(self._given) > _REMEMBERED:
            del self._given[next(iter(self._given))]

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

    def carry(self) -> dict[str, Any]:
        """The answers given, for continue-as-new; legal only when nothing is at work."""
        documents = [answer.model_dump(mode="json") for answer in self._given.values()]
        whole = newest_within(reversed(documents))
        older = Older(self._older.carry())
        given = list(self._given.values())
        for answer in given[: len(given) - whole]:
            older.add(answer.operation_id, DONE if answer.ok else FAILED[answer.kind])
        return {"older": older.carry(), "full": documents[len(documents) - whole :]}
