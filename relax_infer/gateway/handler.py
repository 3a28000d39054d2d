"""One role behind the gateway: from a caller's payload to one backend's answer."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from relax_infer.discovery import (
    InferenceRoutingError,
    Role,
    RoleSnapshot,
    RouteResolver,
    RouteTarget,
)
from relax_infer.gateway._answers import Answer, Exchange, answer_of
from relax_infer.gateway._asgi import JSON, Headers
from relax_infer.gateway._errors import GatewayError, routing
from relax_infer.gateway._headers import Sent, affinity_of, to_backend
from relax_infer.gateway._payload import (
    ChatRequest,
    MessagesRequest,
    RawRequest,
    Selectors,
    is_stream,
    read_chat,
    read_generate,
    read_object,
    rids_of,
)
from relax_infer.gateway._upstream import Upstream
from relax_infer.gateway.judge import Render, request_of, verdict_of

__all__ = ["Answer", "Exchange", "InferenceGatewayHandler", "SnapshotProvider"]

log = logging.getLogger(__name__)

SnapshotProvider = Callable[[], Awaitable[RoleSnapshot | Mapping[str, Any]]]

_GENERATE, _CHAT = "/generate", "/v1/chat/completions"


class InferenceGatewayHandler:
    """Resolves, forwards and streams for one role. A POST is sent at most once."""

    def __init__(
        self,
        role: Role | str,
        snapshot_provider: SnapshotProvider,
        *,
        genrm_render: Render | None = None,
        chat_router: str | None = None,
        timeout: float = 1800.0,
        upstream: Upstream | None = None,
        max_connections: int = 4096,
    ) -> None:
        """
        Args:
            role: rollout, genrm or teacher.
            snapshot_provider: read for every request; failing or of another role means 503.
            genrm_render: makes a judge's prompt of messages; None: messages are refused.
            chat_router: address of a router that chat goes to unchanged, without discovery: for
                engines that are not the run's own.
            timeout: seconds that one request may take in all, its stream included.
            upstream: connections to share with other handlers; None: own ones.
            max_connections: of own connections.
        """
        self.role = Role(role)
        self.timeout = timeout
        self._provider = snapshot_provider
        self._render = genrm_render if self.role is Role.GENRM else None
        self._chat_router = chat_router.rstrip("/") if chat_router else None
        self._resolver = RouteResolver()
        self._upstream = upstream or Upstream(max_connections)

    async def generate(self, body: bytes, headers: Headers, exchange: Exchange) -> Answer:
        """A raw payload to the backend's ``/generate``, or messages to a judge.

        ``exchange`` is filled as the request proceeds, so that whoever is interrupted can end it.

        Raises:
            GatewayError: with the status and detail for the caller.
        """
        request = read_generate(body)
        sent = to_backend(headers)
        if isinstance(request, MessagesRequest):
            return await self._judge(request, sent, exchange)
        return await self._send_raw(request, sent, exchange)

    async def chat(self, body: bytes, headers: Headers, exchange: Exchange) -> Answer:
        """POST to the backend's ``/v1/chat/completions``, under the backend's own model name.

        Raises:
            GatewayError: with the status and detail for the caller.
        """
        sent = to_backend(headers)
        if self._chat_router is not None:
            fields = read_object(body)
            stream, exchange.rids = is_stream(fields), rids_of(fields)
            return await self._post(self._chat_router, _CHAT, sent, body, exchange, stream=stream)
        request = read_chat(body)
        snapshot = await self.snapshot()
        target = self._resolve(snapshot, request.to, sent)
        if target.served_model_name is None:
            raise routing(
                InferenceRoutingError(
                    503, "Discovery does not declare the backend served model name"
                )
            )
        return await self._forward(snapshot, target, request, sent, exchange)

    def end(self, exchange: Exchange) -> None:
        """Give the connection back; unless the backend has answered, abort the request."""
        if exchange.upstream is not None:
            exchange.upstream.close()
        if exchange.asked and not exchange.finished:
            self._upstream.abort(exchange.engines, exchange.rids)

    async def snapshot(self) -> RoleSnapshot:
        """This role's snapshot.

        Raises:
            GatewayError: 503.
        """
        try:
            given = await self._provider()
            snapshot = given if isinstance(given, RoleSnapshot) else RoleSnapshot.from_dict(given)
        except InferenceRoutingError as error:
            raise routing(error) from None
        except Exception as error:  # whatever a provider raises, nothing is known of the role
            log.warning("discovery of %s: %s %s", self.role, type(error).__name__, error)
            raise routing(InferenceRoutingError(503, "Invalid inference discovery")) from error
        if snapshot.role is not self.role:
            raise routing(InferenceRoutingError(503, "Discovery is of another role"))
        return snapshot

    async def models(self) -> dict[str, Any]:
        """OpenAI's list of models: every model of the registry, also those that sleep.

        Raises:
            GatewayError: 503.
        """
        snapshot = await self.snapshot()
        listed = [
            {"id": model, "object": "model", "created": 0, "owned_by": self.role.value}
            for model in snapshot.models
        ]
        return {"object": "list", "data": listed}

    async def health(self) -> dict[str, Any]:
        """Schema 2 health: which models could be called now. Contacts no engine."""
        try:
            snapshot = await self.snapshot()
        except GatewayError:
            return self._health(available=False, models={})
        resolver = RouteResolver()
        models: dict[str, dict[str, Any]] = {}
        for model_id, model in snapshot.models.items():
            try:
                resolver.resolve(snapshot, model=model_id, affinity_key="health")
                ready = True
            except InferenceRoutingError:
                ready = False
            models[model_id] = {"state": model.state.value, "ready": ready}
        return self._health(available=True, models=models)

    async def close(self) -> None:
        """Hang up."""
        await self._upstream.close()

    # --- pieces

    async def _send_raw(self, request: RawRequest, sent: Sent, exchange: Exchange) -> Answer:
        snapshot = await self.snapshot()
        target = self._resolve(snapshot, request.to, sent)
        return await self._forward(snapshot, target, request, sent, exchange)

    async def _judge(self, request: MessagesRequest, sent: Sent, exchange: Exchange) -> Answer:
        """Render, see that the model is still ready, ask once, answer with the text alone."""
        if self._render is None:
            raise GatewayError(400, "messages are not served here; send input_ids or text")
        snapshot = await self.snapshot()
        to = _only_model(snapshot, request.to)
        # A resolver of its own: asked twice, the shared one would pass every other replica over.
        model = self._resolve(snapshot, to, sent, RouteResolver()).model_id
        payload = await self._render(model, request.messages, request.sampling_params)
        raw = request_of(payload, request.to.rids)
        again = await self.snapshot()
        target = self._resolve(again, Selectors(model, None, raw.to.rids), sent)
        answer = await self._forward(again, target, raw, sent, exchange)
        text = verdict_of(answer.body)
        return Answer(200, [JSON], json.dumps({"response": text}).encode())

    async def _forward(
        self,
        snapshot: RoleSnapshot,
        target: RouteTarget,
        request: RawRequest | ChatRequest,
        sent: Sent,
        exchange: Exchange,
    ) -> Answer:
        exchange.rids, exchange.engines = request.to.rids, _engines(snapshot, target)
        if isinstance(request, ChatRequest):
            path, body = _CHAT, request.body(target.served_model_name or "")
        else:
            path, body = _GENERATE, request.body
        return await self._post(target.base_url, path, sent, body, exchange, stream=request.stream)

    async def _post(
        self,
        base_url: str,
        path: str,
        sent: Sent,
        body: bytes,
        exchange: Exchange,
        *,
        stream: bool,
    ) -> Answer:
        exchange.asked = True
        response = exchange.upstream = await self._upstream.post(base_url, path, sent, body)
        return await answer_of(response, exchange, stream=stream)

    def _resolve(
        self,
        snapshot: RoleSnapshot,
        to: Selectors,
        sent: Sent,
        resolver: RouteResolver | None = None,
    ) -> RouteTarget:
        try:
            return (resolver or self._resolver).resolve(
                snapshot, model=to.model, route_key=to.route_key, affinity_key=affinity_of(sent)
            )
        except InferenceRoutingError as error:
            raise routing(error) from None

    def _health(self, *, available: bool, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema_version": 2,
            "role": self.role.value,
            "gateway_alive": True,
            "registry_available": available,
            "ready": bool(models) and all(m["ready"] for m in models.values()),
            "models": models,
        }


def _only_model(snapshot: RoleSnapshot, to: Selectors) -> Selectors:
    """Messages that name nothing go to the only model, or to the key of unnamed instances."""
    if to.model is not None or to.route_key is not None:
        return to
    if len(snapshot.models) == 1:
        return Selectors(next(iter(snapshot.models)), None, to.rids)
    if snapshot.routing.default_model is not None:
        return to
    return Selectors(None, "__default__", to.rids)


def _engines(snapshot: RoleSnapshot, target: RouteTarget) -> tuple[str, ...]:
    if target.engine_id is not None:
        return (target.base_url,)
    engines = snapshot.models[target.model_id].engines
    return tuple(e.base_url for e in engines if e.base_url is not None)
