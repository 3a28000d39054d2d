"""Discovery: what a role's callers may know, who publishes it, and where a request goes.

Schema, registry and resolver are pure; the client (which does HTTP) is imported on first use, so
that workflows can use the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

from relax_infer.discovery.aggregate import RoleDiscovery
from relax_infer.discovery.identity import Generations, engine_id
from relax_infer.discovery.legacy import legacy_document
from relax_infer.discovery.registry import InferenceRegistry, etag_of
from relax_infer.discovery.resolver import InferenceRoutingError, RouteResolver, RouteTarget
from relax_infer.discovery.schema import (
    SCHEMA_VERSION,
    ModelSnapshot,
    Policy,
    ReplicaSnapshot,
    Role,
    RoleSnapshot,
    RouteMode,
    RoutingSpec,
    State,
    WeightSource,
)

if TYPE_CHECKING:
    from relax_infer.discovery._loops import (
        close_loop_inference_clients,
        generate_with_discovery,
    )
    from relax_infer.discovery.client import InferenceClient

__all__ = [
    "SCHEMA_VERSION",
    "Generations",
    "InferenceClient",
    "InferenceRegistry",
    "InferenceRoutingError",
    "ModelSnapshot",
    "Policy",
    "ReplicaSnapshot",
    "Role",
    "RoleDiscovery",
    "RoleSnapshot",
    "RouteMode",
    "RouteResolver",
    "RouteTarget",
    "RoutingSpec",
    "State",
    "WeightSource",
    "close_loop_inference_clients",
    "engine_id",
    "etag_of",
    "generate_with_discovery",
    "legacy_document",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    module = "client" if name == "InferenceClient" else "_loops"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
