"""Engine groups as discovery models: what of a group's state a caller may see."""

from collections.abc import Callable

from relax_infer.contracts.engines import EngineGroupSpec, GroupSnapshot, ReplicaReport
from relax_infer.contracts.external import ExternalEngine, external_id
from relax_infer.discovery import ModelSnapshot, ReplicaSnapshot, RoutingSpec
from relax_infer.machines import GroupState, ReplicaState

_SHOWN = {
    GroupState.STOPPED: "STARTING",
    GroupState.BLOCKED: "FAILED",
    GroupState.STOPPING: "STOPPING",
}


def models_of(
    groups: tuple[GroupSnapshot, ...],
    router_url: str | None,
    externals: Callable[[str], tuple[ExternalEngine, ...]] = lambda model: (),
) -> list[ModelSnapshot]:
    """Schema 2 models of a role's groups; rollout goes through the router, the others directly.
    ``externals``: engines of others that may be called for a model."""
    return [_model(group, router_url, externals(group.model)) for group in groups]


def routing_of(groups: tuple[EngineGroupSpec, ...]) -> RoutingSpec:
    """A single model is the role's default; each model's id is also its route key."""
    models = [g.model for g in groups]
    return RoutingSpec(
        default_model=models[0] if len(models) == 1 else None,
        route_key_map={model: model for model in models},
    )


def router_workers(groups: tuple[GroupSnapshot, ...]) -> tuple[str, ...] | None:
    """Addresses of ours that the router must hold: those whose weights are current and that answer.
    None while a group lets go or sleeps: as they are.

    A sleeping engine stays listed although new weights may come before it answers again: its own
    gate, which opens behind proved weights only, refuses every request, and to register it again
    would cost seconds at each handover. It leaves the list when it stops, and one that takes
    weights in place leaves it before.
    """
    if any(g.state in (GroupState.DRAINING, GroupState.SLEEPING) for g in groups):
        return None
    return tuple(
        r.base_url for g in groups for r in g.replicas if r.base_url and r.replica not in g.leaving
    )


def _model(
    group: GroupSnapshot, router_url: str | None, externals: tuple[ExternalEngine, ...]
) -> ModelSnapshot:
    routed = group.role == "rollout"
    version = group.weight_version
    # While a lost replica is mended its siblings go on answering.
    answers = any(
        replica.state is ReplicaState.READY and replica.replica not in group.leaving
        for replica in group.replicas
    )
    return ModelSnapshot(
        model_id=group.model,
        state="READY" if answers else _SHOWN.get(group.state, str(group.state)),
        route_mode="SGLANG_ROUTER" if routed else "DIRECT",
        router_url=router_url if routed else None,
        weight_source=group.weight_source,
        weight_version=str(version)
        if group.weight_source != "STATIC" and version is not None
        else None,
        served_model_name=group.model,
        engines=[
            ReplicaSnapshot(
                engine_id=replica.engine_id,
                base_url=replica.base_url if replica.state is ReplicaState.READY else None,
                state=str(replica.state),
                direct_eligible=not routed,
                generation=generation,
            )
            for replica, generation in zip(_shown(group), group.generations, strict=False)
        ]
        + [
            ReplicaSnapshot(
                engine_id=external_id(group.model, engine.url),
                base_url=engine.url,
                state=str(ReplicaState.READY),
                direct_eligible=not routed,
                generation=1,
            )
            for engine in externals
        ],
    )


def _shown(group: GroupSnapshot) -> list[ReplicaReport]:
    """Each replica as a caller may see it: one that leaves is draining, although it may answer."""
    return [
        replica.model_copy(update={"state": ReplicaState.DRAINING, "base_url": None})
        if replica.replica in group.leaving and replica.state is ReplicaState.READY
        else replica
        for replica in group.replicas
    ]
