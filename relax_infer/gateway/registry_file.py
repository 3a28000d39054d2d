"""Registries from a file that people or other systems write: the gateway without a run.

The file maps a role to its schema 2 document, as JSON or YAML. It is read again when it changes;
what cannot be used changes nothing, and :meth:`RegistryFile.facts` says why.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from relax_infer.contracts.failures import PermanentError
from relax_infer.discovery import ModelSnapshot, ReplicaSnapshot, Role, RoleSnapshot, RoutingSpec
from relax_infer.gateway.intake import Held, RegistryIntake

log = logging.getLogger(__name__)

_LARGEST = 64 << 20
"""Bytes. A thousand replicas take 200 KB."""
_CURE = (
    "Give each role (rollout, genrm, teacher) its schema 2 document, as GET /<role>/engines of a"
    " gateway answers it."
)


class RegistryFile:
    """Keeps an intake at what the file says. Every reading that changes anything is a new term."""

    def __init__(self, path: Path, intake: RegistryIntake) -> None:
        self.path, self._intake = path, intake
        self._term = 0
        self._seen: object = None
        self._problem: str | None = None

    def load(self) -> None:
        """Serve what the file says from now on.

        Raises:
            PermanentError: it cannot be read or is not valid; nothing has changed.
        """
        self._seen = self._mark()
        documents = self._documents()
        self._term += 1
        for role in Role:
            snapshot = documents.get(role)
            if snapshot is None:
                self._intake.drop(role)
            else:
                self._offer(role, snapshot)
        self._problem = None

    def reload(self) -> None:
        """Load it if it has changed; a problem is said and changes nothing."""
        if self._mark() == self._seen:
            return
        try:
            self.load()
            log.info("%s was read again", self.path)
        except PermanentError as error:
            self._problem = error.message
            log.warning("%s; what was read before is served on", error.message)

    async def watch(self, pause: float = 0.5) -> None:
        """Look for changes until cancelled; ``pause`` in seconds."""
        while True:
            await asyncio.sleep(pause)
            await asyncio.to_thread(self.reload)

    def facts(self) -> dict[str, Any]:
        """For ``/healthz``."""
        registry: dict[str, Any] = {"file": str(self.path), "readings": self._term}
        if self._problem is None:
            return {"registry": registry}
        return {"status": "degraded", "registry": registry | {"problem": self._problem}}

    def _mark(self) -> object:
        try:
            found = self.path.stat()
        except OSError as error:
            return type(error).__name__
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _offer(self, role: Role, snapshot: RoleSnapshot) -> None:
        held = self._intake.get(role)
        if held is not None:
            snapshot = _advanced(held, snapshot, self.path)
            if snapshot == held.snapshot:
                return
        self._intake.offer(role, self._term, snapshot.to_dict())

    def _documents(self) -> dict[Role, RoleSnapshot]:
        content = self._content()
        if not isinstance(content, Mapping) or not content:
            raise self._wrong(f"it must map roles to documents, got {type(content).__name__}")
        found: dict[Role, RoleSnapshot] = {}
        for name, document in content.items():
            if name not in list(Role):
                raise self._wrong(f"{name!r} is no role")
            try:
                snapshot = RoleSnapshot.from_dict(document)
            except ValueError as error:
                raise self._wrong(f"{name}{_where(document)}: {_what(error)}") from error
            if snapshot.role != name:
                raise self._wrong(f"{name}.role: the document is of {snapshot.role}")
            found[Role(name)] = snapshot
        return found

    def _content(self) -> Any:
        if self.path.exists() and not self.path.is_file():  # opening a pipe would wait for ever
            raise PermanentError(
                f"the registry file {self.path} cannot be read: it is no regular file.", cure=_CURE
            )
        try:
            if (size := self.path.stat().st_size) > _LARGEST:
                raise self._wrong(f"it has {size} bytes, {_LARGEST} are the most")
            text = self.path.read_text(encoding="utf-8")
            return json.loads(text) if self.path.suffix == ".json" else yaml.safe_load(text)
        except OSError as error:
            raise PermanentError(
                f"the registry file {self.path} cannot be read: {error.strerror}.", cure=_CURE
            ) from error
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            kind = "JSON" if self.path.suffix == ".json" else "YAML"
            told = " ".join(str(error).split())
            raise self._wrong(f"it is not {kind}: {told}") from error

    def _wrong(self, what: str) -> PermanentError:
        return PermanentError(f"the registry file {self.path} is not valid: {what}.", cure=_CURE)


def _advanced(held: Held, snapshot: RoleSnapshot, path: Path) -> RoleSnapshot:
    """``snapshot`` under a revision of its own, for callers that know (epoch, revision).

    People forget to raise ``topology_revision``; then it is raised here, as a registry would.
    """
    before = held.snapshot
    if snapshot.registry_epoch != before.registry_epoch:
        return snapshot
    as_before = snapshot.model_copy(update={"topology_revision": before.topology_revision})
    if as_before == before and snapshot.topology_revision <= before.topology_revision:
        return before
    if snapshot.topology_revision > before.topology_revision:
        return snapshot
    raised = before.topology_revision + 1
    log.warning(
        "%s: %s changed under topology_revision %d; it is served as %d",
        path,
        snapshot.role,
        snapshot.topology_revision,
        raised,
    )
    return snapshot.model_copy(update={"topology_revision": raised})


def _what(error: ValueError) -> str:
    """One line, with the field where pydantic knows it."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    told = first["msg"].removeprefix("Value error, ")
    return f"{field}: {told}" if field else told


def _where(document: Any) -> str:
    """Path to the smallest part that is wrong by itself, such as ``.models.m.engines.0``."""
    if not isinstance(document, Mapping):
        return ""
    if _fails(RoutingSpec.from_dict, document.get("routing", {})):
        return ".routing"
    models = document.get("models")
    for key, model in models.items() if isinstance(models, Mapping) else ():
        engines = model.get("engines") if isinstance(model, Mapping) else None
        for place, engine in enumerate(engines if isinstance(engines, list) else ()):
            if _fails(ReplicaSnapshot.from_dict, engine):
                return f".models.{key}.engines.{place}"
        if _fails(lambda document, key=key: ModelSnapshot.from_dict(document, key), model):
            return f".models.{key}"
    return ""


def _fails(parse: Any, document: object) -> bool:
    try:
        parse(document)
    except ValueError:
        return True
    return False
