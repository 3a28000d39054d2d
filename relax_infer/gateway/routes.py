"""The public routes by role: one table for the app, its metrics and its OpenAPI description."""

from dataclasses import dataclass
from typing import Literal

from relax_infer.discovery import Role

Kind = Literal["generate", "chat", "models", "engines", "health", "metrics"]


@dataclass(frozen=True)
class RoleRoute:
    """One route below ``/<role>``."""

    method: Literal["GET", "POST"]
    path: str
    kind: Kind


_EVERY = (
    RoleRoute("POST", "/generate", "generate"),
    RoleRoute("POST", "/chat/completions", "chat"),
    RoleRoute("POST", "/v1/chat/completions", "chat"),
    RoleRoute("GET", "/v1/models", "models"),
    RoleRoute("GET", "/engines", "engines"),
    RoleRoute("GET", "/health", "health"),
)


def routes_of(role: Role) -> tuple[RoleRoute, ...]:
    """What is served below ``/<role>``."""
    if role is Role.GENRM:
        return (*_EVERY, RoleRoute("GET", "/metrics", "metrics"))
    return _EVERY


ENGINES_SCHEMAS = {Role.ROLLOUT: ("2", "1"), Role.GENRM: ("2",), Role.TEACHER: ("2",)}
HEALTH_SCHEMAS = {Role.ROLLOUT: ("2",), Role.GENRM: ("1", "2"), Role.TEACHER: ("2",)}
"""Values of ``?schema=``, the default first."""
