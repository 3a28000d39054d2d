"""The operations that a lease remembers: the same id joins one at work, or gets its result."""

from typing import Any

from relax_infer.contracts.lease import LeaseAnswer, LeaseRequest
from workflows._failures import fail
from workflows._lease_book import LeaseRefused
from workflows._older import DONE, DONE_SILENTLY, FAILED, Older, newest_within, what_is_left

_REMEMBERED = 8192


class Operation:
    """One operation: what it was, and how it ended once it has."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.answer: LeaseAnswer | None = None
        self.error: tuple[str, str] | None = None
        """Kind of failure and text."""

    @property
    def ended(self) -> bool:
        return self.answer is not None or self.error is not None

    def result(self) -> LeaseAnswer:
        """The answer; raises what the operation failed with."""
        if self.error is not None:
            raise fail(*self.error)
        assert self.answer is not None
        return self.answer


class Operations:
    """By operation id, oldest first; ended ones are forgotten beyond a bound.

    Of those from before a continue-as-new only the newest have their answers; see
    :mod:`workflows._older`.
    """

    def __init__(self, carried: dict[str, Any] | None = None) -> None:
        carried = carried or {"older": "", "full": {}}
        self._older = Older(carried["older"])
        self._known = {key: _restore(document) for key, document in carried["full"].items()}

    @property
    def idle(self) -> bool:
        return all(operation.ended for operation in self._known.values())

    def find(self, request: LeaseRequest) -> Operation | None:
        """The one with the request's id, if it is known.

        Raises:
            LeaseRefused: the id was used for something else.
        """
        known = self._known.get(request.operation_id)
        if known is None:
            return self._find_older(request)
        if known.fingerprint != request.fingerprint:
            raise LeaseRefused(
                f"operation {request.operation_id} was {known.fingerprint}; the same id now has a"
                f" different fingerprint {request.fingerprint}"
            )
        return known

    def _find_older(self, request: LeaseRequest) -> Operation | None:
        asked = request.operation_id
        outcome = self._older.outcome(asked)
        if outcome is None:
            return None
        if not self._older.is_same(asked, request.fingerprint):
            raise LeaseRefused(
                f"operation {asked} was something else; the same id now has a different"
                f" fingerprint {request.fingerprint}"
            )
        operation = Operation(request.fingerprint)
        if outcome == DONE_SILENTLY:
            operation.answer = LeaseAnswer()
        else:
            operation.error = what_is_left(asked, outcome)
        return operation

    def begin(self, request: LeaseRequest) -> Operation:
        operation = self._known[request.operation_id] = Operation(request.fingerprint)
        return operation

    def forget_old(self) -> None:
        self._older.drop(len(self._older) + len(self._known) - _REMEMBERED)
        if len(self._known) <= _REMEMBERED:
            return
        for operation_id, operation in list(self._known.items()):
            if len(self._known) <= _REMEMBERED:
                return
            if operation.ended:
                del self._known[operation_id]

    def carry(self) -> dict[str, Any]:
        """For continue-as-new, when none is at work."""
        documents = {key: _carry(operation) for key, operation in self._known.items()}
        whole = newest_within({key: documents[key]} for key in reversed(documents))
        older = Older(self._older.carry())
        for key in list(documents)[: len(documents) - whole]:
            operation = self._known[key]
            older.add(key, _outcome(operation), operation.fingerprint)
            del documents[key]
        return {"older": older.carry(), "full": documents}


def _outcome(operation: Operation) -> str:
    if operation.error is not None:
        return FAILED[operation.error[0]]
    return DONE_SILENTLY if operation.answer == LeaseAnswer() else DONE


def _carry(operation: Operation) -> dict[str, Any]:
    answer = operation.answer.model_dump(mode="json") if operation.answer else None
    return {"fingerprint": operation.fingerprint, "answer": answer, "error": operation.error}


def _restore(document: dict[str, Any]) -> Operation:
    operation = Operation(document["fingerprint"])
    if document["answer"] is not None:
        operation.answer = LeaseAnswer.model_validate(document["answer"])
    if document["error"] is not None:
        kind, text = document["error"]
        operation.error = (kind, text)
    return operation
