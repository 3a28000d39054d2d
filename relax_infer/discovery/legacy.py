"""The schema 1 view of a role, for callers that have not moved to schema 2.

Groups of regular engines alone, and of each engine its rank, status and address: no process ids,
nodes, or prefill and decode workers.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from relax_infer.discovery.identity import rank_of
from relax_infer.discovery.schema import ModelSnapshot, ReplicaSnapshot, RoleSnapshot, State

_GONE = (State.DEAD, State.FAILED)


def legacy_document(snapshot: RoleSnapshot) -> dict[str, Any]:
    """``models`` (by id) and ``total_engines``, of all models together.

    An engine without an address is left out, and the totals count what is listed. ``router_ip`` and
    ``router_port`` are None for a model whose replicas are called directly.
    """
    models = {model_id: _model(model) for model_id, model in snapshot.models.items()}
    return {
        "models": models,
        "total_engines": sum(model["total_engines"] for model in models.values()),
    }


def _model(model: ModelSnapshot) -> dict[str, Any]:
    router = urlsplit(model.router_url) if model.router_url is not None else None
    engines = _engines(model.engines)
    return {
        "router_ip": router.hostname if router else None,
        "router_port": (router.port or _default_port(router.scheme)) if router else None,
        "engine_groups": [{"worker_type": "regular", "engines": engines}] if engines else [],
        "total_engines": len(engines),
    }


def _engines(replicas: Sequence[ReplicaSnapshot]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    for position, replica in enumerate(replicas):
        if replica.base_url is None:
            continue
        rank = rank_of(replica.engine_id)
        listed.append(
            {
                "rank": position if rank is None else rank,
                "status": "dead" if replica.state in _GONE else "active",
                "url": replica.base_url,
            }
        )
    return sorted(listed, key=lambda engine: engine["rank"])


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
