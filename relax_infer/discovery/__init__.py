"""Discovery: what a role's callers may know, who publishes it, and where a request goes.

Schema, registry and resolver are pure; the client (which does HTTP) is imported on first use, so
that workflows can use the rest.
"""

from relax_infer.discovery.registry import InferenceRegistry
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

__all__ = [
    "SCHEMA_VERSION",
    "InferenceRegistry",
    "InferenceRoutingError",
    "ModelSnapshot",
    "Policy",
    "ReplicaSnapshot",
    "Role",
    "RoleSnapshot",
    "RouteMode",
    "RouteResolver",
    "RouteTarget",
    "RoutingSpec",
    "State",
    "WeightSource",
]
