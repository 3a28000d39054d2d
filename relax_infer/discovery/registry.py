"""The registry of one role: the only place where a topology revision is made."""

import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import quote

from relax_infer.discovery._fields import sequence
from relax_infer.discovery.schema import (
    ModelSnapshot,
    Role,
    RoleSnapshot,
    RoutingSpec,
    State,
)

_TAG_CHARACTERS = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in '"%')
"""Of ASCII, what stands in an entity tag as it is."""


class InferenceRegistry:
    """Complete, validated snapshots with a revision that grows with every change.

    Does no I/O and, given an epoch, draws nothing random, so a workflow may own one. Thread-safe.
    """

    def __init__(self, role: Role | str, registry_epoch: str | None = None) -> None:
        """``registry_epoch``: None draws a uuid4; revision 0 has no models."""
        epoch = str(uuid.uuid4()) if registry_epoch is None else registry_epoch
        self._lock = threading.Lock()
        self._current = RoleSnapshot(role=role, registry_epoch=epoch, topology_revision=0)

    def publish(
        self,
        models: Iterable[ModelSnapshot] | Mapping[str, ModelSnapshot | Mapping[str, Any]],
        routing: RoutingSpec | Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Replace the whole snapshot; the revision grows unless nothing changed.

        Args:
            models: models, or a mapping of model id to a model or its JSON.
            routing: None keeps the current one.

        Returns:
            The document in force, detached.

        Raises:
            ValueError: the candidate is not valid; the last valid snapshot stays in force.
        """
        listed = _by_id(models)
        if routing is not None and not isinstance(routing, RoutingSpec):
            routing = RoutingSpec.from_dict(routing)
        with self._lock:
            return self._advance(listed, self._current.routing if routing is None else routing)

    @property
    def current(self) -> RoleSnapshot:
        """The snapshot in force: frozen, the same object until something changes. Costs nothing."""
        return self._current

    def snapshot(self) -> dict[str, Any]:
        """The document in force, detached."""
        return self._current.to_dict()

    def invalidate(self) -> dict[str, Any]:
        """Nothing is known any more: everything UNKNOWN, nobody eligible, a new revision."""
        with self._lock:
            unknown = {key: _unknown(model) for key, model in self._current.models.items()}
            return self._advance(unknown, self._current.routing, always=True)

    def _advance(
        self, models: Mapping[str, ModelSnapshot], routing: RoutingSpec, *, always: bool = False
    ) -> dict[str, Any]:
        current = self._current
        candidate = RoleSnapshot(
            role=current.role,
            registry_epoch=current.registry_epoch,
            topology_revision=current.topology_revision + 1,
            routing=routing,
            models=models,
        )
        if always or (candidate.models, candidate.routing) != (current.models, current.routing):
            self._current = candidate
        return self._current.to_dict()


def etag_of(snapshot: Mapping[str, Any]) -> str:
    """A document's strong entity tag, ``"<registry_epoch>-<topology_revision>"`` with its quotes.

    One epoch has one document per revision, so equal tags are equal documents. What a header
    cannot carry is percent-encoded (RFC 9110 section 8.8.3 allows visible ASCII but no quote).
    """
    epoch = quote(str(snapshot["registry_epoch"]), safe=_TAG_CHARACTERS)
    return f'"{epoch}-{snapshot["topology_revision"]}"'


def _by_id(
    models: Iterable[ModelSnapshot] | Mapping[str, ModelSnapshot | Mapping[str, Any]],
) -> dict[str, ModelSnapshot]:
    if isinstance(models, Mapping):
        named = cast("Mapping[str, ModelSnapshot | Mapping[str, Any]]", models)
        return {
            key: model if isinstance(model, ModelSnapshot) else ModelSnapshot.from_dict(model, key)
            for key, model in named.items()
        }
    listed: dict[str, ModelSnapshot] = {}
    for model in sequence(models, "models"):
        if not isinstance(model, ModelSnapshot):
            raise ValueError(f"models must be models, got {type(model).__name__}")
        if model.model_id in listed:
            raise ValueError(f"Duplicate model_id: {model.model_id}")
        listed[model.model_id] = model
    return listed


def _unknown(model: ModelSnapshot) -> ModelSnapshot:
    """``model`` with nothing known of its state; identities and addresses stay."""
    nothing = {"state": State.UNKNOWN, "direct_eligible": False}
    engines = tuple(engine.model_copy(update=nothing) for engine in model.engines)
    return model.model_copy(update={"state": State.UNKNOWN, "engines": engines})
