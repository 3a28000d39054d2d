"""One role behind the gateway: from a caller's payload to one backend's answer."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from relax_infer.discovery import (
    InferenceRoutingError,
    Role,
    RoleSnapshot,
    RouteResolver,
    RouteTarget,
)
from relax_infer.gateway._asgi import Headers
from relax_infer.gateway._errors import GatewayError, routing
from relax_infer.gateway._headers import affinity_of, to_backend, to_caller
from relax_infer.gateway._payload import RawRequest, is_json, read_raw
from relax_infer.gateway._upstream import Upstream

log = logging.getLogger(__name__)

SnapshotProvider = Callable[[], Awaitable[RoleSnapshot | Mapping[str, Any]]]

_ERROR_BODY = 65536
"""Bytes of an upstream error's body that are passed on."""


@dataclass
class Answer:
    """A backend's answer on its way to the caller."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """Everything, or the first chunk of a stream."""
    rest: AsyncIterator[bytes] | None = None
    """The other chunks of a stream, untouched."""


@dataclass
class Exchange:
    """One request under way; :meth:`InferenceGatewayHandler.end` must be called exactly once."""

    request: RawRequest | None = None
    target: RouteTarget | None = None
    engines: tuple[str, ...] = ()
    """Addresses that may hold the request: the target, or every engine behind the router."""
    upstream: aiohttp.ClientResponse | None = None
    finished: bool = False
    """The backend has answered and has nothing more to do for this request."""


class InferenceGatewayHandler:
    """Resolves, forwards and streams for one role. A POST is sent at most once."""

    def __init__(
        self,
        role: Role | str,
        snapshot_provider: SnapshotProvider,
        *,
        timeout: float = 1800.0,
        upstream: Upstream | None = None,
        max_connections: int = 4096,
    ) -> None:
        """
        Args:
            role: rollout, genrm or teacher.
            snapshot_provider: read for every request; failing or of another role means 503.
            timeout: seconds that one request may take in all, its stream included.
            upstream: connections to share with other handlers; None: own ones.
            max_connections: of own connections.
        """
        self.role = Role(role)
        self.timeout = timeout
        self._provider = snapshot_provider
        self._resolver = RouteResolver()
        self._upstream = upstream or Upstream(max_connections)

    async def generate(self, body: bytes, headers: Headers, exchange: Exchange) -> Answer:
        """POST the raw payload to the backend's ``/generate``.

        ``exchange`` is filled as the request proceeds, so that whoever is interrupted can end it.

        Raises:
            GatewayError: with the status and detail for the caller.
        """
        request = exchange.request = read_raw(body)
        sent = to_backend(headers)
        snapshot = await self.snapshot()
        try:
            target = exchange.target = self._resolver.resolve(
                snapshot,
                model=request.model,
                route_key=request.route_key,
                affinity_key=affinity_of(sent),
            )
        except InferenceRoutingError as error:
            raise routing(error) from None
        exchange.engines = _engines(snapshot, target)
        response = exchange.upstream = await self._upstream.post(
            target.base_url, "/generate", sent, request.body
        )
        if response.status >= 400:
            raise await _upstream_error(response, exchange)
        if request.stream:
            first = await _read(response)
            exchange.finished = not first
            rest = _rest(response, exchange) if first else None
            headers = to_caller(response.raw_headers, buffered=rest is None)
            return Answer(response.status, headers, first, rest)
        answer = await _read_all(response)
        exchange.finished = True
        if "Content-Encoding" not in response.headers and not is_json(answer):
            raise GatewayError(502, "Inference backend did not answer JSON")
        headers = to_caller(response.raw_headers, buffered=True)
        return Answer(response.status, headers, answer)

    def end(self, exchange: Exchange) -> None:
        """Give the connection back; unless the backend has answered, abort the request."""
        response, request = exchange.upstream, exchange.request
        if response is not None:
            if response.content.at_eof():
                response.release()
            else:
                response.close()
        if request is not None and exchange.target is not None and not exchange.finished:
            self._upstream.abort(exchange.engines, request.rids)

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

    def _health(self, *, available: bool, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            "schema_version": 2,
            "role": self.role.value,
            "gateway_alive": True,
            "registry_available": available,
            "ready": bool(models) and all(m["ready"] for m in models.values()),
            "models": models,
        }


def _engines(snapshot: RoleSnapshot, target: RouteTarget) -> tuple[str, ...]:
    if target.engine_id is not None:
        return (target.base_url,)
    engines = snapshot.models[target.model_id].engines
    return tuple(e.base_url for e in engines if e.base_url is not None)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


async def _read_all(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(502, "Inference backend is unavailable") from error


async def _rest(response: aiohttp.ClientResponse, exchange: Exchange) -> AsyncIterator[bytes]:
    while chunk := await _read(response):
        yield chunk
    exchange.finished = True


async def _upstream_error(response: aiohttp.ClientResponse, exchange: Exchange) -> GatewayError:
    """The same status, with its Retry-After and what it says."""
    again = tuple(
        (b"retry-after", value)
        for key, value in response.raw_headers
        if key.lower() == b"retry-after"
    )
    exchange.finished = True
    length = response.content_length
    if length is None or length > _ERROR_BODY:
        return GatewayError(response.status, f"Inference backend answered {response.status}", again)
    text = (await _read_all(response)).decode(errors="replace")
    try:
        document = json.loads(text)
    except ValueError:
        return GatewayError(response.status, text, again)
    detail = document.get("detail", text) if isinstance(document, dict) else text
    return GatewayError(response.status, detail, again)
