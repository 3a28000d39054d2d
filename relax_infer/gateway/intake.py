"""What the gateway knows of each role: the newest registry document that reached it.

Pure: no I/O, no clock. Documents are ordered by (term, topology revision); an epoch has no order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relax_infer.contracts.base import MOST_COUNT
from relax_infer.discovery import Role, RoleSnapshot, etag_of

Outcome = Literal["accepted", "unchanged"]


@dataclass(frozen=True)
class Held:
    """One role's document, parsed once and ready to be served."""

    term: int
    snapshot: RoleSnapshot
    body: bytes
    """The document as JSON."""
    etag: bytes
    """Names this revision of this registry."""

    @property
    def order(self) -> tuple[int, int]:
        return self.term, self.snapshot.topology_revision

    def to_dict(self) -> dict[str, Any]:
        return {
            "term": self.term,
            "topology_revision": self.snapshot.topology_revision,
            "registry_epoch": self.snapshot.registry_epoch,
        }


class RegistryRefused(Exception):
    """The document is older than, or contradicts, the one that is held."""

    def __init__(self, reason: Literal["older", "conflict"], held: Held, message: str) -> None:
        self.reason, self.held = reason, held
        super().__init__(message)


class RegistryIntake:
    """Takes newer documents, refuses older ones."""

    def __init__(self) -> None:
        self._held: dict[Role, Held] = {}

    def offer(self, role: Role | str, term: int, document: Mapping[str, Any]) -> Outcome:
        """Hold the document from now on, unless it is the one that is held.

        Raises:
            ValueError: not a valid document of this role, or not a term.
            RegistryRefused: older (term, revision), or another document under the same one.
        """
        role = Role(role)
        if isinstance(term, bool) or not isinstance(term, int) or not 0 <= term <= MOST_COUNT:
            raise ValueError(f"term must be an integer from 0 to {MOST_COUNT}, got {term!r}")
        snapshot = RoleSnapshot.from_dict(document)
        if snapshot.role is not role:
            raise ValueError(f"a document of role {snapshot.role} was offered for {role}")
        body = json.dumps(snapshot.to_dict(), separators=(",", ":")).encode()
        offered = Held(term, snapshot, body, etag_of(snapshot.to_dict()).encode())
        held = self._held.get(role)
        if held is not None and offered.order <= held.order:
            if offered.order == held.order and offered.body == held.body:
                return "unchanged"
            reason = "older" if offered.order < held.order else "conflict"
            raise RegistryRefused(
                reason,
                held,
                f"{role} (term, revision) {offered.order} is refused: {reason}, held {held.order}",
            )
        self._held[role] = offered
        return "accepted"

    def drop(self, role: Role | str) -> None:
        """Hold nothing of this role."""
        self._held.pop(Role(role), None)

    def get(self, role: Role | str) -> Held | None:
        """None until a document came."""
        return self._held.get(Role(role))

    def to_dict(self) -> dict[str, Any]:
        """Terms, revisions and documents of all roles that are held."""
        return {
            role.value: held.to_dict() | {"document": held.snapshot.to_dict()}
            for role, held in sorted(self._held.items())
        }
