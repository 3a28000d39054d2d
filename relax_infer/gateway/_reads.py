"""The read routes of a role: discovery, models, health. They contact no engine."""

import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from relax_infer.discovery import Role
from relax_infer.gateway._asgi import JSON, Receive, Scope, Send, header, reply_bytes
from relax_infer.gateway._errors import RETRY_SOON, GatewayError
from relax_infer.gateway.handler import InferenceGatewayHandler
from relax_infer.gateway.intake import RegistryIntake
from relax_infer.gateway.legacy import engines_document, genrm_health
from relax_infer.gateway.metrics import CONTENT_TYPE, Metrics
from relax_infer.gateway.routes import ENGINES_SCHEMAS, HEALTH_SCHEMAS, Kind

Route = Callable[[Scope, Receive, Send], Awaitable[None]]
Found = tuple[int, bytes, tuple[tuple[bytes, bytes], ...]]


class Reads:
    """Answers of one role."""

    def __init__(
        self, handler: InferenceGatewayHandler, intake: RegistryIntake, metrics: Metrics
    ) -> None:
        self._handler, self._intake, self._metrics = handler, intake, metrics
        self._role = handler.role

    def route(self, kind: Kind) -> Route:
        find = {
            "models": self._models,
            "engines": self._engines,
            "health": self._health,
            "metrics": self._role_metrics,
        }[kind]

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                status, body, headers = await find(scope)
            except GatewayError as error:
                status, body = error.status, json.dumps({"detail": error.detail}).encode()
                headers = (JSON, *error.headers)
            if status == 304:  # has no body, and so no length of one
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": b""})
            else:
                await reply_bytes(send, status, body, headers)

        return route

    async def _models(self, scope: Scope) -> Found:
        return _json(await self._handler.models())

    async def _engines(self, scope: Scope) -> Found:
        query = _query(scope)
        schema = _schema(query, ENGINES_SCHEMAS[self._role], "Unsupported discovery schema")
        held = self._intake.get(self._role)
        if held is None:
            raise _unknown(self._role)
        if schema == "1":
            return _json(engines_document(held.snapshot))
        for name in query.get("model_name", []):
            if name not in held.snapshot.models:
                raise GatewayError(404, f"Unknown model {name!r}")
        tag = (b"etag", held.etag)
        if _matches(header(scope, b"if-none-match"), held.etag):
            return 304, b"", (tag,)
        return 200, held.body, (JSON, tag)

    async def _health(self, scope: Scope) -> Found:
        schema = _schema(_query(scope), HEALTH_SCHEMAS[self._role], "Unsupported health schema")
        health = await self._handler.health()
        return _json(genrm_health(health) if schema == "1" else health)

    async def _role_metrics(self, scope: Scope) -> Found:
        return 200, self._metrics.text(self._role), ((b"content-type", CONTENT_TYPE),)


def _unknown(role: Role) -> GatewayError:
    return GatewayError(503, f"No registry of {role} yet", (RETRY_SOON,))


def _json(document: dict[str, Any]) -> Found:
    return 200, json.dumps(document).encode(), (JSON,)


def _query(scope: Scope) -> dict[str, list[str]]:
    try:
        text = scope["query_string"].decode("latin-1")
        return parse_qs(text, keep_blank_values=True, max_num_fields=100)
    except ValueError:
        raise GatewayError(400, "The query has too many fields") from None


def _schema(query: dict[str, list[str]], known: tuple[str, ...], refusal: str) -> str:
    """The one that is asked for; the first is the default."""
    asked = query.get("schema", [known[0]])
    if len(asked) != 1 or asked[0] not in known:
        raise GatewayError(400, refusal)
    return asked[0]


def _matches(given: bytes | None, etag: bytes) -> bool:
    """``If-None-Match``: a list of tags, weak ones too, or ``*``."""
    if given is None:
        return False
    tags = [tag.strip().removeprefix(b"W/") for tag in given.split(b",")]
    return etag in tags or given.strip() == b"*"
