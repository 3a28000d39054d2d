"""One role out of several engine groups, each with a registry of its own."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from relax_infer.discovery._fields import text
from relax_infer.discovery._reader import Known, SnapshotReader
from relax_infer.discovery.registry import InferenceRegistry
from relax_infer.discovery.schema import (
    ModelSnapshot,
    Role,
    RoleSnapshot,
    RouteMode,
    RoutingSpec,
    State,
)

log = logging.getLogger(__name__)

SOURCE_TIMEOUT = 10.0
"""Seconds that one source may take to answer."""

Source = Callable[[], Awaitable[RoleSnapshot | Mapping[str, Any]]]
_Mark = tuple[str, int]


class RoleDiscovery:
    """Reads every source and publishes the role as one snapshot with its own epoch and revision.

    A source is an engine group's registry of exactly one model; it is published under the source's
    key, whatever the group calls it, with the source's epoch in its replicas' identities. A source
    that fails or is late is a FAILED model without replicas; the others are not affected.
    """

    def __init__(
        self,
        role: Role | str,
        sources: Mapping[str, Source],
        *,
        registry_epoch: str | None = None,
        timeout: float = SOURCE_TIMEOUT,
    ) -> None:
        """
        Args:
            role: of every source.
            sources: key (the model id and route key to publish) to a function that gives the
                group's schema 2 document.
            registry_epoch: of the aggregated registry; None draws a uuid4.
            timeout: seconds for each source; all are asked at once.

        Raises:
            ValueError: no source, or a key that is no text.
        """
        if not sources:
            raise ValueError(f"{role} needs at least one source")
        self._sources = {text(key): source for key, source in sources.items()}
        self._registry = InferenceRegistry(role, registry_epoch)
        self._role = Role(role)
        self._timeout = timeout
        self._reader = SnapshotReader(self._aggregate, ttl=0.0, clock=time.monotonic)
        self._marks: dict[str, _Mark | None] | None = None

    async def read(self) -> dict[str, Any]:
        """Ask every source and publish what they say; the document in force, detached.

        Anything that a source changed since the last read advances the revision, also what came
        back to the same (a restart behind the same address, a sleep and a wake). Without a change
        two reads give equal documents. Who asks while others wait shares their next read.
        """
        return (await self._reader.latest()).snapshot.to_dict()

    async def _aggregate(self, _: Known | None) -> Known:
        found = await asyncio.gather(*(self._ask(key) for key in self._sources))
        snapshots = dict(zip(self._sources, found, strict=True))
        marks = {key: _mark(snapshot) for key, snapshot in snapshots.items()}
        if self._marks is not None and marks != self._marks:
            self._registry.invalidate()
        self._marks = marks
        models = [_model(key, snapshot) for key, snapshot in snapshots.items()]
        self._registry.publish(models, _routing(models))
        return Known(self._registry.current)

    async def _ask(self, key: str) -> RoleSnapshot | None:
        try:
            async with asyncio.timeout(self._timeout):
                given = await self._sources[key]()
            snapshot = given if isinstance(given, RoleSnapshot) else RoleSnapshot.from_dict(given)
            if snapshot.role is not self._role:
                raise ValueError(f"role is {snapshot.role}")
            if len(snapshot.models) != 1:
                raise ValueError(f"{len(snapshot.models)} models, exactly one is wanted")
        except Exception as error:  # whatever a source raises, nothing is known of its model
            log.warning("%s source %s: %s %s", self._role, key, type(error).__name__, error)
            return None
        return snapshot


def _mark(snapshot: RoleSnapshot | None) -> _Mark | None:
    return None if snapshot is None else (snapshot.registry_epoch, snapshot.topology_revision)


def _model(key: str, snapshot: RoleSnapshot | None) -> ModelSnapshot:
    if snapshot is None:
        return ModelSnapshot(model_id=key, state=State.FAILED, route_mode=RouteMode.DIRECT)
    (model,) = snapshot.models.values()
    prefix = f"{key}/{snapshot.registry_epoch}/"
    engines = tuple(e.model_copy(update={"engine_id": prefix + e.engine_id}) for e in model.engines)
    return model.model_copy(update={"model_id": key, "engines": engines})


def _routing(models: list[ModelSnapshot]) -> RoutingSpec:
    keys = {m.model_id for m in models}
    served = Counter(m.served_model_name for m in models)
    return RoutingSpec(
        default_model=models[0].model_id if len(models) == 1 else None,
        route_key_map={key: key for key in keys},
        aliases={
            m.served_model_name: m.model_id
            for m in models
            if m.served_model_name is not None
            and served[m.served_model_name] == 1
            and m.served_model_name not in keys
        },
    )
