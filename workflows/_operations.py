"""The operations that a lease remembers: the same id joins one at work, or gets its result."""

from typing import Any

from relax_infer.contracts.lease import LeaseAnswer, LeaseRequest
from workflows._failures import fail
from workflows._lease_book import LeaseRefused

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
    """By operation id, oldest first; ended ones are forgotten beyond a bound."""

    def __init__(self, carried: dict[str, Any] | None = None) -> None:
        self._known = {key: _restore(document) for key, document in (carried or {}).items()}

    @property
    def idle(self) -> bool:
        return all(operation.ended for operation in self._known.values())

    def find(self, request: LeaseRequest) -> Operation | None:
        """The one with the request's id, if it is known.

        Raises:
            LeaseRefused: the id was used for something else.
        """
        known = self._known.get(request.operation_id)
        if known is not None and known.fingerprint != request.fingerprint:
            raise LeaseRefused(
                f"operation {request.operation_id} was {known.fingerprint}; the same id now has a"
                f" different fingerprint {request.fingerprint}"
            )
        return known

    def begin(self, request: LeaseRequest) -> Operation:
        operation = self._known[request.operation_id] = Operation(request.fingerprint)
        return operation

    def forget_old(self) -> None:
        for operation_id, operation in list(self._known.items()):
            if len(self._known) <= _REMEMBERED:
                return
            if operation.ended:
                del self._known[operation_id]

    def carry(self) -> dict[str, Any]:
        """For continue-as-new, when none is at work."""
        return {key: _carry(operation) for key, operation in self._known.items()}


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
