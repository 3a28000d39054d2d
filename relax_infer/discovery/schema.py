"""Schema 2: what a role's callers may know of its models, replicas and routing.

Values are frozen to the last level and validated on construction; every failure is a
``ValueError`` (pydantic's is one). Enum fields also take their plain text. ``from_dict`` reads
JSON documents strictly, ``to_dict`` writes plain ones.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from relax_infer.discovery._fields import (
    FrozenMap,
    Integer,
    Text,
    Url,
    json_list,
    keyed,
    mapping,
    sequence,
    text_map,
    unique_texts,
)

SCHEMA_VERSION = 2


class Role(StrEnum):
    """Kinds of inference behind the gateway."""

    ROLLOUT = "rollout"
    """The policy that generates."""
    GENRM = "genrm"
    """The generative reward model."""
    TEACHER = "teacher"
    """The model that is distilled from."""


class State(StrEnum):
    """State of a model or replica as its callers see it."""

    UNKNOWN = "UNKNOWN"
    """Nothing valid has been heard."""
    STARTING = "STARTING"
    """Not up yet."""
    READY = "READY"
    """May be called."""
    DRAINING = "DRAINING"
    """Finishing or cancelling its requests; takes no new ones."""
    SLEEPING = "SLEEPING"
    """Has let go of its GPUs."""
    ONLOADING = "ONLOADING"
    """Coming back, or changing weights."""
    FAILED = "FAILED"
    """Broken, or its release is unconfirmed."""
    STOPPING = "STOPPING"
    """Ending."""
    DEAD = "DEAD"
    """Ended, with proof."""


class RouteMode(StrEnum):
    """Who picks the replica."""

    DIRECT = "DIRECT"
    """The resolver."""
    SGLANG_ROUTER = "SGLANG_ROUTER"
    """An sglang-router in front of the replicas."""


class WeightSource(StrEnum):
    """Where a model's weights come from."""

    STATIC = "STATIC"
    """Loaded once, never updated."""
    ACTOR = "ACTOR"
    """The trainer publishes new versions."""
    DCS = "DCS"
    """Versions published by the trainer's own transport (fully asynchronous schedule)."""


class Policy(StrEnum):
    """How the resolver picks among ready replicas when a request names no affinity."""

    ROUND_ROBIN = "round_robin"
    """One after the other."""
    AFFINITY = "affinity"
    """Not at all: a request must carry an affinity key."""


_NO_STATIC = frozenset(
    {"weight_update", "update_weights", "dcs", "register_dcs", "seed_weight_sync"}
)
"""Capabilities that a model with fixed weights cannot have."""


def _engines(value: object) -> tuple["ReplicaSnapshot", ...]:
    engines = tuple(sequence(value, "engines"))
    for engine in engines:
        if not isinstance(engine, ReplicaSnapshot):
            raise ValueError(f"engines must be replicas, got {type(engine).__name__}")
    counts = Counter(e.engine_id for e in engines)
    if len(counts) < len(engines):
        doubled = sorted(i for i, count in counts.items() if count > 1)
        raise ValueError(f"Duplicate engine_id: {', '.join(doubled)}")
    return tuple(sorted(engines, key=lambda e: e.engine_id))


def _models(value: object) -> FrozenMap["ModelSnapshot"]:
    models = mapping(value, "models")
    for key, model in models.items():
        if not isinstance(model, ModelSnapshot):
            raise ValueError(f"models must be models, got {type(model).__name__} at {key!r}")
        if model.model_id != key:
            raise ValueError(f"model_id {model.model_id!r} is listed under the key {key!r}")
    return FrozenMap(models)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ReplicaSnapshot(_Frozen):
    """One logical replica: its head alone, whatever number of workers stand behind it."""

    engine_id: Text
    """Stable identity of the logical replica."""
    base_url: Url | None
    """Address of the head (or of its admission guard)."""
    state: State
    direct_eligible: Annotated[bool, Field(strict=True)]
    """May be picked by a resolver; False unless READY with an address, whatever was asked."""
    generation: Integer = 0
    """Rises when the worker set or the address changes."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            engine_id: str,
            base_url: str | None,
            state: State | str,
            direct_eligible: bool,
            generation: int = 0,
        ) -> None: ...

    @model_validator(mode="after")
    def _only_ready_is_eligible(self) -> Self:
        if self.direct_eligible and (self.state is not State.READY or self.base_url is None):
            object.__setattr__(self, "direct_eligible", False)
        return self

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """From JSON; unknown or missing keys are errors."""
        required = ("engine_id", "base_url", "state", "direct_eligible")
        return cls(**keyed(document, "replica", required, ("generation",)))

    def to_dict(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "base_url": self.base_url,
            "state": self.state.value,
            "direct_eligible": self.direct_eligible,
            "generation": self.generation,
        }


class ModelSnapshot(_Frozen):
    """One model of a role with its replicas."""

    model_id: Text
    state: State
    route_mode: RouteMode
    router_url: Url | None = None
    engines: Annotated[tuple[ReplicaSnapshot, ...], PlainValidator(_engines)] = ()
    """Sorted by engine_id."""
    weight_source: WeightSource = WeightSource.STATIC
    weight_version: Text | None = None
    """None for STATIC."""
    capabilities: Annotated[tuple[str, ...], PlainValidator(unique_texts)] = ()
    """Sorted, each once."""
    served_model_name: Text | None = None
    """The name that the backend itself answers to."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            model_id: str,
            state: State | str,
            route_mode: RouteMode | str,
            router_url: str | None = None,
            engines: Iterable[ReplicaSnapshot] = (),
            weight_source: WeightSource | str = WeightSource.STATIC,
            weight_version: str | None = None,
            capabilities: Iterable[str] = (),
            served_model_name: str | None = None,
        ) -> None: ...

    @model_validator(mode="after")
    def _static_stays(self) -> Self:
        if self.weight_source is WeightSource.STATIC:
            if self.weight_version is not None:
                raise ValueError("a STATIC model has no weight_version")
            wrong = [c for c in self.capabilities if c.lower() in _NO_STATIC]
            if wrong:
                raise ValueError(f"a STATIC model cannot have capabilities {', '.join(wrong)}")
        return self

    @classmethod
    def from_dict(cls, document: object, model_id: str | None = None) -> Self:
        """From JSON; ``model_id`` is the key that it is listed under."""
        fields = keyed(
            document,
            "model",
            ("state", "route_mode", "engines", "weight_source"),
            ("model_id", "router_url", "weight_version", "capabilities", "served_model_name"),
        )
        if model_id is not None:
            named = fields.setdefault("model_id", model_id)
            if named != model_id:
                raise ValueError(f"model_id {named!r} is listed under the key {model_id!r}")
        elif "model_id" not in fields:
            raise ValueError("Missing model fields: model_id")
        fields["engines"] = json_list(fields["engines"], ReplicaSnapshot.from_dict, "engines")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model_id": self.model_id,
            "state": self.state.value,
            "route_mode": self.route_mode.value,
            "router_url": self.router_url,
            "engines": [e.to_dict() for e in self.engines],
            "weight_source": self.weight_source.value,
            "weight_version": self.weight_version,
            "capabilities": list(self.capabilities),
            "served_model_name": self.served_model_name,
        }


class RoutingSpec(_Frozen):
    """How requests that do not name an exact model id find one."""

    default_model: Text | None = None
    route_key_map: Annotated[Mapping[str, str], PlainValidator(text_map)] = Field(
        default_factory=FrozenMap
    )
    """Route key to model id."""
    aliases: Annotated[Mapping[str, str], PlainValidator(text_map)] = Field(
        default_factory=FrozenMap
    )
    """Alias to model id."""
    policy: Policy = Policy.ROUND_ROBIN
    policy_revision: Integer = 0

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            default_model: str | None = None,
            route_key_map: Mapping[str, str] = ...,
            aliases: Mapping[str, str] = ...,
            policy: Policy | str = Policy.ROUND_ROBIN,
            policy_revision: int = 0,
        ) -> None: ...

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """From JSON; every key is optional, unknown ones are errors."""
        known = ("default_model", "route_key_map", "aliases", "policy", "policy_revision")
        return cls(**keyed(document, "routing", (), known))

    def to_dict(self) -> dict[str, Any]:
        return {
            "default_model": self.default_model,
            "route_key_map": dict(self.route_key_map),
            "aliases": dict(self.aliases),
            "policy": self.policy.value,
            "policy_revision": self.policy_revision,
        }


class RoleSnapshot(_Frozen):
    """A whole role at one revision of one registry."""

    schema_version: Annotated[int, Field(strict=True, ge=2, le=2)] = SCHEMA_VERSION
    role: Role
    registry_epoch: Text
    """Names one registry instance; epochs have no order."""
    topology_revision: Integer
    """Grows with every change within an epoch."""
    routing: RoutingSpec = Field(default_factory=RoutingSpec)
    models: Annotated[Mapping[str, ModelSnapshot], PlainValidator(_models)] = Field(
        default_factory=lambda: FrozenMap[ModelSnapshot]()
    )
    """By model id."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            role: Role | str,
            registry_epoch: str,
            topology_revision: int,
            routing: RoutingSpec = ...,
            models: Mapping[str, ModelSnapshot] = ...,
            schema_version: int = SCHEMA_VERSION,
        ) -> None: ...

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        if self.role is not Role.ROLLOUT:
            for model in self.models.values():
                if model.weight_source is not WeightSource.STATIC:
                    raise ValueError(
                        f"{self.role} model {model.model_id!r} must be STATIC,"
                        f" is {model.weight_source}"
                    )
        routing = self.routing
        targets = [*routing.aliases.values(), *routing.route_key_map.values()]
        if routing.default_model is not None:
            targets.append(routing.default_model)
        unknown = sorted({t for t in targets if t not in self.models})
        if unknown:
            raise ValueError(f"Routing references an unknown model: {', '.join(unknown)}")
        for alias, target in routing.aliases.items():
            if alias in self.models and alias != target:
                raise ValueError(
                    f"Model aliases must not shadow another model ID: {alias!r} -> {target!r}"
                )
        return self

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """From JSON, strictly; raises ``ValueError`` on anything off."""
        required = (
            *("schema_version", "role", "registry_epoch", "topology_revision"),
            *("routing", "models"),
        )
        fields = keyed(document, "registry", required)
        fields["routing"] = RoutingSpec.from_dict(fields["routing"])
        fields["models"] = {
            key: ModelSnapshot.from_dict(model, key)
            for key, model in mapping(fields["models"], "models").items()
        }
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """A plain, detached document; ``from_dict`` of it is equal."""
        return {
            "schema_version": self.schema_version,
            "role": self.role.value,
            "registry_epoch": self.registry_epoch,
            "topology_revision": self.topology_revision,
            "routing": self.routing.to_dict(),
            "models": {key: model.to_dict() for key, model in self.models.items()},
        }
