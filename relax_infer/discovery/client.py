"""A caller's side of discovery: pick a ready backend, send one POST, never send it again."""

import asyncio
import copy
import json
import math
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import urlsplit

import aiohttp

from relax_infer.discovery._fields import url as valid_url
from relax_infer.discovery.resolver import InferenceRoutingError, RouteResolver, RouteTarget
from relax_infer.discovery.schema import RoleSnapshot

Document = dict[str, Any]

AFFINITY = "X-SMG-Routing-Key"
MAX_CONNECTIONS = 1024

_GENERATE, _CHAT = "/generate", "/v1/chat/completions"
_KEEP_ALIVE = 3.0
"""Seconds. An SGLang server hangs up idle connections after 5; a POST must not meet that."""


@dataclass(frozen=True)
class _Cached:
    document: Document
    until: float


class InferenceClient:
    """Asks the models of one role, through discovery.

    A request selects at most twice, the second time after a 503 and with discovery read again; a
    400 is raised at once, and a sleeping model is never woken. Whatever goes wrong once the POST
    was tried invalidates what was known and is raised: only the caller knows if it may be repeated.
    """

    def __init__(
        self,
        *,
        discovery_url: str | None = None,
        snapshot_provider: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
        gateway_url: str | None = None,
        timeout: float = 60.0,
        cache_ttl: float = 1.0,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            discovery_url: a role's address, e.g. ``http://host:port/teacher``; exactly one of this
                and ``snapshot_provider``.
            snapshot_provider: gives the role's schema 2 document.
            gateway_url: a role's address at a gateway that requests go through; None: directly to
                the engine or router that discovery names.
            timeout: seconds for discovery, request and answer (streams included) together.
            cache_ttl: seconds for which a document is used again.
            max_connections: requests that may be in flight at once; others wait for their turn.
            clock: seconds, for the cache.
        """
        if (discovery_url is None) == (snapshot_provider is None):
            raise ValueError("give exactly one of discovery_url and snapshot_provider")
        if not (_is_number(timeout) and math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        if not (_is_number(cache_ttl) and cache_ttl >= 0):
            raise ValueError(f"cache_ttl must be a number of seconds from 0, got {cache_ttl!r}")
        if not isinstance(cast("object", max_connections), int) or isinstance(
            max_connections, bool
        ):
            raise ValueError(f"max_connections must be an int, got {max_connections!r}")
        if max_connections < 1:
            raise ValueError(f"max_connections must be positive, got {max_connections}")
        self._discovery = None if discovery_url is None else valid_url(discovery_url)
        self._provider = snapshot_provider
        self._gateway = None if gateway_url is None else valid_url(gateway_url)
        self._timeout, self._ttl, self._clock = timeout, cache_ttl, clock
        self._limit = max_connections
        self._resolver = RouteResolver()
        self._reading = asyncio.Lock()
        self._cached: _Cached | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; the client may be used again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def snapshot(self, refresh: bool = False) -> Document:
        """The role's document, detached; not older than ``cache_ttl``.

        What was known is forgotten before it is read again, so that a discovery that fails leaves
        no address behind. Raises whatever reading raises (``aiohttp.ClientError``, TimeoutError).
        """
        async with self._reading:
            cached = self._cached
            if refresh or cached is None or self._clock() >= cached.until:
                self._cached = None
                document = await self._read()
                cached = self._cached = _Cached(document, self._clock() + self._ttl)
            return copy.deepcopy(cached.document)

    async def generate(
        self,
        payload: Mapping[str, Any],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Document:
        """POST ``/generate`` and its JSON answer.

        ``model`` and ``route_key`` may also stand in the payload, which is not changed.

        Raises:
            InferenceRoutingError: nothing may be called (400, 503); nothing was sent.
            aiohttp.ClientResponseError: the backend answered an error status.
            aiohttp.ClientError: it could not be reached, or hung up.
            TimeoutError: the deadline.
            ValueError: its answer is no JSON object.
        """
        return await self._ask(_GENERATE, payload, model, route_key, affinity_key, headers)

    async def chat(
        self,
        payload: Mapping[str, Any],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Document:
        """POST ``/v1/chat/completions``; as :meth:`generate`."""
        return await self._ask(_CHAT, payload, model, route_key, affinity_key, headers)

    async def stream(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes]:
        """The answer's bytes as they come, untouched; ``payload`` asks the backend to stream.

        ``path``: ``/generate`` or ``/v1/chat/completions``. Every chunk is under the one deadline;
        after it the backend is hung up on and TimeoutError raised. Errors as :meth:`generate`.
        """
        deadline = self._deadline()
        async with asyncio.timeout_at(deadline):
            target = await self._select(payload, model, route_key, affinity_key, headers)
        async with self._sent(deadline, path, payload, target, affinity_key, headers) as response:
            while True:
                async with asyncio.timeout_at(deadline):
                    chunk = await response.content.readany()
                if not chunk:
                    return
                yield chunk

    # --- pieces

    async def _ask(
        self,
        path: str,
        payload: Mapping[str, Any],
        model: str | None,
        route_key: str | None,
        affinity_key: str | None,
        headers: Mapping[str, str] | None,
    ) -> Document:
        deadline = self._deadline()
        async with asyncio.timeout_at(deadline):
            target = await self._select(payload, model, route_key, affinity_key, headers)
            async with self._sent(
                deadline, path, payload, target, affinity_key, headers
            ) as response:
                body = await response.read()
                answer: object = json.loads(body)
                if not isinstance(answer, dict):
                    raise ValueError(f"{response.url} answered no JSON object")
                return cast("Document", answer)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _select(
        self,
        payload: Mapping[str, Any],
        model: str | None,
        route_key: str | None,
        affinity_key: str | None,
        headers: Mapping[str, str] | None,
    ) -> RouteTarget:
        selectors: dict[str, Any] = {
            "model": payload.get("model") if model is None else model,
            "route_key": payload.get("route_key") if route_key is None else route_key,
            "affinity_key": _named(headers, AFFINITY) if affinity_key is None else affinity_key,
        }
        try:
            return self._resolver.resolve(await self.snapshot(), **selectors)
        except InferenceRoutingError as error:
            if error.status_code != 503:
                raise
        return self._resolver.resolve(await self.snapshot(refresh=True), **selectors)

    @asynccontextmanager
    async def _sent(
        self,
        deadline: float,
        path: str,
        payload: Mapping[str, Any],
        target: RouteTarget,
        affinity_key: str | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The one POST. Any way out but a whole answer forgets what was known, and hangs up."""
        body = self._outgoing(path, payload, target)
        sent_headers = dict(headers or {})
        if affinity_key is not None and _named(headers, AFFINITY) is None:
            sent_headers[AFFINITY] = affinity_key
        address = endpoint_url(self._gateway or target.base_url, path)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._open().post(
                    address, json=body, headers=sent_headers, allow_redirects=False
                )
                await _raise_for_status(response)
            yield response
        except BaseException:
            self._cached = None
            if response is not None:
                response.close()
            raise
        finally:
            if response is not None:
                response.release()

    def _outgoing(self, path: str, payload: Mapping[str, Any], target: RouteTarget) -> Document:
        body = {k: v for k, v in payload.items() if k not in ("model", "route_key")}
        if self._gateway is not None:
            body["model"] = target.model_id
        elif path != _GENERATE:
            if target.served_model_name is None:
                raise InferenceRoutingError(
                    503, "Discovery does not declare the backend served model name"
                )
            body["model"] = target.served_model_name
        return body

    async def _read(self) -> Document:
        if self._provider is not None:
            document: object = await self._provider()
            if isinstance(document, RoleSnapshot):
                return document.to_dict()
            return copy.deepcopy(cast("Document", document))
        address = endpoint_url(self._discovery or "", "/engines")
        async with self._open().get(address, params={"schema": "2"}) as response:
            await _raise_for_status(response)
            return await response.json(content_type=None)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._limit, keepalive_timeout=_KEEP_ALIVE, ttl_dns_cache=30
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )
        return self._session


_Key = tuple[str, float, int]
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, InferenceClient]] = (
    weakref.WeakKeyDictionary()
)


async def generate_with_discovery(
    discovery_url: str,
    payload: Mapping[str, Any],
    *,
    model: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 1800.0,
    max_connections: int = MAX_CONNECTIONS,
) -> Document:
    """:meth:`InferenceClient.generate` with one client per event loop, address and settings.

    Affinity is read from the header ``X-SMG-Routing-Key``. Close the loop's clients with
    :func:`close_loop_inference_clients` before the loop ends.
    """
    mine = _clients.setdefault(asyncio.get_running_loop(), {})
    key = (discovery_url, timeout, max_connections)
    if key not in mine:
        mine[key] = InferenceClient(
            discovery_url=discovery_url, timeout=timeout, max_connections=max_connections
        )
    return await mine[key].generate(payload, model=model, headers=headers)


async def close_loop_inference_clients() -> None:
    """Close every client that :func:`generate_with_discovery` made in the running loop."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.close()


def endpoint_url(base: str, path: str) -> str:
    """``base`` (its own path kept) with ``path`` after it.

    Raises:
        ValueError: the path does not begin with a single slash, or has a query or fragment.
    """
    parts = urlsplit(path)
    if not path.startswith("/") or path.startswith("//") or parts.query or parts.fragment:
        raise ValueError(f"path must be /like/this, without query or fragment: {path!r}")
    if any(c.isspace() or not c.isprintable() or c in "?#\\@" for c in path):
        raise ValueError(f"path has characters that do not belong there: {path!r}")
    return valid_url(base) + path


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status >= 400:
        text = await response.text(errors="replace")
        raise aiohttp.ClientResponseError(
            response.request_info,
            response.history,
            status=response.status,
            message=text[:2000],
            headers=response.headers,
        )


def _named(headers: Mapping[str, str] | None, name: str) -> str | None:
    for key, value in (headers or {}).items():
        if key.lower() == name.lower():
            return value
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
