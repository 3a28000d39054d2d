"""What is kept of old operations: that they were, and how they ended. Without Temporal.

A workflow that continues as new takes everything along in one argument, for which Temporal has room
for 2 MiB; above that it fails the task and tries again for ever. So only the newest answers go
along whole, and of the others enough to know an operation again and not to carry it out twice.
"""

import hashlib
import json
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from typing import Any

from workflows._failures import PERMANENT, TRANSIENT, UNCONFIRMED

FULL_BYTES = 96 * 1024
"""Of the answers that go along whole, in each store of them."""
DONE, DONE_SILENTLY = "+", "."
"""It was carried out; the second with an answer that says nothing else."""
FAILED = {TRANSIENT: "T", PERMANENT: "P", UNCONFIRMED: "U"}
_KINDS = {letter: kind for kind, letter in FAILED.items()}
_ID, _PRINT = 12, 8
"""Characters of the digests of an id and of a fingerprint."""
_ENTRY = _ID + _PRINT + 1


class Older:
    """Operations by digests of their ids, oldest first; 21 bytes for each."""

    def __init__(self, carried: str = "") -> None:
        entries = (carried[at : at + _ENTRY] for at in range(0, len(carried), _ENTRY))
        self._known = {entry[:_ID]: entry[_ID:] for entry in entries}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, operation_id: str, outcome: str, fingerprint: str = "") -> None:
        """``outcome``: DONE, DONE_SILENTLY or one of FAILED."""
        self._known[_digest(operation_id, _ID)] = _digest(fingerprint, _PRINT) + outcome

    def outcome(self, operation_id: str) -> str | None:
        """How it ended; None: it is not among them."""
        known = self._known.get(_digest(operation_id, _ID))
        return None if known is None else known[_PRINT:]

    def is_same(self, operation_id: str, fingerprint: str) -> bool:
        """Whether an operation that is among them was this."""
        return self._known[_digest(operation_id, _ID)][:_PRINT] == _digest(fingerprint, _PRINT)

    def drop(self, number: int) -> None:
        """Forget the oldest."""
        for _ in range(min(number, len(self._known))):
            del self._known[next(iter(self._known))]

    def carry(self) -> str:
        return "".join(key + rest for key, rest in self._known.items())


def what_is_left(operation_id: str, outcome: str) -> tuple[str, str]:
    """Kind of failure and text for who asks again after the answer was dropped. Of what was carried
    out it is Permanent: asking once more brings no answer."""
    kind = _KINDS.get(outcome)
    if kind is None:
        return PERMANENT, (
            f"operation {operation_id} was carried out long ago and is not carried out again; its"
            " answer is not kept any more: ask where things stand"
        )
    return kind, f"operation {operation_id} failed long ago; the reason is not kept any more"


def newest_within(documents: Iterable[dict[str, Any]], limit: int = FULL_BYTES) -> int:
    """How many of these, newest first, may go along in ``limit`` bytes of JSON."""
    number = 0
    for document in documents:
        limit -= len(json.dumps(document, separators=(",", ":")))
        if limit < 0:
            break
        number += 1
    return number


def _digest(text: str, length: int) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()[:length]
