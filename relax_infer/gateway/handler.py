"""One role behind the gateway: from a caller's payload to one backend's answer."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from relax_infer.discovery import (
    InferenceRoutingError,
    Role,
    RoleSnapshot,
    RouteResolver,
    RouteTarget,
)
from relax_infer.gateway._answers import Answer, Exchange, answer_of
from relax_infer.gateway._asgi import JSON, Headers
from relax_infer.gateway._errors import RETRY_SOON, GatewayError, routing
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


class Plan(NamedTuple):
    """One POST to a backend, chosen and written."""

    base_url: str
    path: str
    body: bytes
    stream: bool
    rids: tuple[str, ...]
    engines: tuple[str, ...]
    """Addresses that may hold the request: the target, or every engine behind the router."""


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
            return await self.judge(request, sent, exchange)
        return await self._post(self.plan(request, await self.snapshot(), sent), sent, exchange)

    async def chat(self, body: bytes, headers: Headers, exchange: Exchange) -> Answer:
        """POST to the backend's ``/v1/chat/completions``, under the backend's own model name.

        Raises:
            GatewayError: with the status and detail for the caller.
        """
        request = self.read_chat(body)
        sent = to_backend(headers)
        if not isinstance(request, Plan):
            request = self.plan(request, await self.snapshot(), sent)
        return await self._post(request, sent, exchange)

    def read_chat(self, body: bytes) -> "ChatRequest | Plan":
        """What is asked, or where it goes if nobody need be asked for that.

        Raises:
            GatewayError: 400.
        """
        if self._chat_router is None:
            return read_chat(body)
        fields = read_object(body)
        return Plan(self._chat_router, _CHAT, body, is_stream(fields), rids_of(fields), ())

    def plan(self, request: RawRequest | ChatRequest, snapshot: RoleSnapshot, sent: Sent) -> Plan:
        """Choose the backend.

        Raises:
            GatewayError: 400, 503.
        """
        target = self._resolve(snapshot, request.to, sent)
        if isinstance(request, ChatRequest):
            name = target.served_model_name
            if name is None:
                raise GatewayError(
                    503, "Discovery does not declare the backend served model name", (RETRY_SOON,)
                )
            path, body = _CHAT, request.body(name)
        else:
            path, body = _GENERATE, request.body
        engines = _engines(snapshot, target)
        return Plan(target.base_url, path, body, request.stream, request.to.rids, engines)

    def begin(self, exchange: Exchange, plan: Plan) -> None:
        """The backend is about to be asked; :meth:`end` gives back what this takes."""
        exchange.rids, exchange.engines, exchange.asked = plan.rids, plan.engines, True
        self._upstream.hold(plan.rids)

    def end(self, exchange: Exchange) -> None:
        """Give the connection back; unless the backend has answered, abort the request."""
        if exchange.upstream is not None:
            exchange.upstream.close()
        if exchange.asked:
            self._upstream.let_go(exchange.rids)
            if not exchange.finished:
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

    async def judge(self, request: MessagesRequest, sent: Sent, exchange: Exchange) -> Answer:
        """Render, see that the model is still ready, ask once, answer with the text alone.

        Raises:
            GatewayError: with the status and detail for the caller.
        """
        if self._render is None:
            raise GatewayError(400, "messages are not served here; send input_ids or text")
        snapshot = await self.snapshot()
        to = _only_model(snapshot, request.to)
        # A resolver of its own: asked twice, the shared one would pass every other replica over.
        model = self._resolve(snapshot, to, sent, RouteResolver()).model_id
        payload = await self._render(model, request.messages, request.sampling_params)
        raw = request_of(payload, request.to.rids)
        again = await self.snapshot()
        to = Selectors(model, None, raw.to.rids)
        answer = await self._post(self.plan(raw._replace(to=to), again, sent), sent, exchange)
        text = verdict_of(answer.body)
        return Answer(200, [JSON], json.dumps({"response": text}).encode())

    # --- pieces

    async def _post(self, plan: Plan, sent: Sent, exchange: Exchange) -> Answer:
        self.begin(exchange, plan)
        response = await self._upstream.post(plan.base_url, plan.path, sent, plan.body)
        exchange.upstream = response
        return await answer_of(response, exchange, stream=plan.stream)

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
