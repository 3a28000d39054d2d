"""Which backend a request goes to: pure, the same for the gateway and for a direct client."""

import threading
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from relax_infer.discovery._candidates import Candidates
from relax_infer.discovery.schema import (
    ModelSnapshot,
    Policy,
    ReplicaSnapshot,
    RoleSnapshot,
    RouteMode,
    State,
)

_SHOWN = 200


class InferenceRoutingError(Exception):
    """No backend may be called: 400, the request is at fault; 503, try again later. Pickles."""

    def __init__(self, status_code: int, message: str) -> None:
        self.status_code, self.message = status_code, message
        super().__init__(status_code, message)

    def __str__(self) -> str:
        return self.message


class RouteTarget(BaseModel):
    """Where one request goes, and what the choice rests on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_id: str
    base_url: str
    engine_id: str | None
    """None when an sglang-router picks the replica."""
    generation: int
    registry_epoch: str
    topology_revision: int
    served_model_name: str | None


class _Index:
    """What the models of one snapshot have to choose from, found when first asked for."""

    def __init__(self, snapshot: RoleSnapshot, before: dict[str, Candidates]) -> None:
        self.snapshot, self.before = snapshot, before
        self.models: dict[str, Candidates] = {}
        self.targets: dict[tuple[str, str | None], RouteTarget] = {}
        """By model and replica: a choice among the same is answered with the same object."""

    def candidates(self, model: ModelSnapshot) -> Candidates:
        model_id = model.model_id
        found = self.models.get(model_id)
        if found is None:
            found = Candidates(self.snapshot.role.value, model, self.before.get(model_id))
            self.models[model_id] = found
        return found

    def target(self, model: ModelSnapshot, engine: ReplicaSnapshot | None = None) -> RouteTarget:
        """``engine``: None where the model's router picks the replica."""
        key = (model.model_id, None if engine is None else engine.engine_id)
        target = self.targets.get(key)
        if target is None:
            target = self.targets[key] = RouteTarget(
                model_id=model.model_id,
                base_url=(model.router_url if engine is None else engine.base_url) or "",
                engine_id=key[1],
                generation=0 if engine is None else engine.generation,
                registry_epoch=self.snapshot.registry_epoch,
                topology_revision=self.snapshot.topology_revision,
                served_model_name=model.served_model_name,
            )
        return target


class RouteResolver:
    """Resolves requests against snapshots. Its only state is the round robin's cursors.

    Cursors are per role, epoch and model; a new epoch of a role starts again at its first replica.
    What a snapshot's models have to choose from is indexed once per ``RoleSnapshot`` object: give
    the same object again, rather than its document, which is parsed every time. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: dict[str, str] = {}
        self._cursors: dict[tuple[str, str], int] = {}
        self._indexes: dict[str, _Index] = {}

    def resolve(
        self,
        snapshot: RoleSnapshot | Mapping[str, Any],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
    ) -> RouteTarget:
        """The backend for one request.

        ``model`` (an exact id, then an alias) wins over ``route_key``, which wins over the role's
        default. ``affinity_key`` sticks to one replica by rendezvous hash.

        Raises:
            InferenceRoutingError: 400 or 503; nothing ever falls through to another model.
        """
        known = valid_snapshot(snapshot)
        _check("model", model)
        _check("route_key", route_key)
        _check("affinity_key", affinity_key)
        found = _select(known, model, route_key)
        if found.state is not State.READY:
            raise InferenceRoutingError(503, f"Model {found.model_id!r} is {found.state}")
        if found.route_mode is RouteMode.SGLANG_ROUTER:
            if found.router_url is None:
                raise InferenceRoutingError(503, f"Model {found.model_id!r} has no router")
            return self._index(known).target(found)
        index = self._index(known)
        candidates = index.candidates(found)
        ready = candidates.replicas
        if not ready:
            raise InferenceRoutingError(503, f"Model {found.model_id!r} has no ready replica")
        if affinity_key is not None:
            engine = candidates.of(affinity_key)
        elif known.routing.policy is Policy.AFFINITY:
            raise InferenceRoutingError(400, "Routing policy affinity requires an affinity key")
        else:
            engine = ready[self._turn(known, found.model_id) % len(ready)]
        return index.target(found, engine)

    def _index(self, snapshot: RoleSnapshot) -> _Index:
        role = snapshot.role.value
        index = self._indexes.get(role)
        if index is None or index.snapshot is not snapshot:
            # Two threads may both do this; they come to the same.
            index = self._indexes[role] = _Index(snapshot, {} if index is None else index.models)
        return index

    def _turn(self, snapshot: RoleSnapshot, model_id: str) -> int:
        role, epoch = snapshot.role.value, snapshot.registry_epoch
        with self._lock:
            if self._epochs.get(role) != epoch:
                self._epochs[role] = epoch
                self._cursors = {k: v for k, v in self._cursors.items() if k[0] != role}
            turn = self._cursors.get((role, model_id), 0)
            self._cursors[role, model_id] = turn + 1
            return turn


def valid_snapshot(document: object) -> RoleSnapshot:
    """The snapshot, parsed if need be; InferenceRoutingError (503) when it is none."""
    if isinstance(document, RoleSnapshot):
        return document
    try:
        return RoleSnapshot.from_dict(document)
    except ValueError as error:
        raise InferenceRoutingError(503, "Invalid inference discovery") from error


def _check(name: str, selector: object) -> None:
    if selector is not None and not (isinstance(selector, str) and selector.strip()):
        raise InferenceRoutingError(400, f"{name} must be a non-empty string")


def _select(snapshot: RoleSnapshot, model: str | None, route_key: str | None) -> ModelSnapshot:
    routing = snapshot.routing
    if model is not None:
        chosen = model if model in snapshot.models else routing.aliases.get(model)
        if chosen is None:
            raise InferenceRoutingError(400, f"Unknown model {_shown(model)}")
    elif route_key is not None:
        chosen = routing.route_key_map.get(route_key)
        if chosen is None:
            raise InferenceRoutingError(400, f"Unknown route_key {_shown(route_key)}")
    else:
        chosen = routing.default_model
        if chosen is None:
            raise InferenceRoutingError(400, "An explicit model or route_key is required")
    return snapshot.models[chosen]


def _shown(name: str) -> str:
    """A caller's own word, for an answer to it: not more of it than tells which one."""
    return repr(name) if len(name) <= _SHOWN else f"{name[:_SHOWN]!r}… ({len(name)} characters)"
