"""A caller's side of discovery: pick a ready backend, send one POST, never send it again."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any, Self, cast

import aiohttp

from relax_infer.discovery._fields import url as valid_url
from relax_infer.discovery._http import (
    checked,
    endpoint_url,
    named,
    new_session,
    over,
    refuse_error,
    speaking_http,
)
from relax_infer.discovery._reader import Reading, SnapshotReader
from relax_infer.discovery._sources import SnapshotProvider, from_provider, from_url
from relax_infer.discovery.resolver import InferenceRoutingError, RouteResolver, RouteTarget

__all__ = ["AFFINITY", "MAX_CONNECTIONS", "Document", "InferenceClient", "endpoint_url"]

Document = dict[str, Any]

AFFINITY = "X-SMG-Routing-Key"
MAX_CONNECTIONS = 1024

_SHOWN = 200
"""Characters of an answer that its error quotes."""
_GENERATE, _CHAT = "/generate", "/v1/chat/completions"
_PATHS = (_GENERATE, _CHAT, "/chat/completions")


class InferenceClient:
    """Asks the models of one role, through discovery.

    A request selects at most twice, the second time after a 503 and with discovery read again; a
    400 is raised at once, and a sleeping model is never woken. Whatever goes wrong once the POST
    was tried invalidates what was known and is raised: only the caller knows if it may be repeated.
    A request that waits for its turn selects when its turn comes. For one event loop.
    """

    def __init__(
        self,
        *,
        discovery_url: str | None = None,
        snapshot_provider: SnapshotProvider | None = None,
        gateway_url: str | None = None,
        timeout: float = 60.0,
        cache_ttl: float = 1.0,
        max_connections: int = MAX_CONNECTIONS,
        headers: Mapping[str, str] | None = None,
        ssl: SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            discovery_url: a role's address, e.g. ``http://host:port/teacher``; exactly one of this
                and ``snapshot_provider``.
            snapshot_provider: gives the role's schema 2 document, or its RoleSnapshot.
            gateway_url: a role's address at a gateway that requests go through; None: directly to
                the engine or router that discovery names.
            timeout: seconds for waiting, discovery, request and answer (streams included) together;
                and for a :meth:`snapshot`.
            cache_ttl: seconds for which a document is used again.
            max_connections: requests that may be in flight at once; others wait for their turn.
                Discovery has connections of its own.
            headers: sent to discovery and with every request; a request's own win. What was given
                as ``Authorization`` for a ``discovery_url`` also goes to the gateway, and not to
                engines that discovery names.
            ssl: whom to trust behind an ``https`` address, e.g.
                ``ssl.create_default_context(cafile="ca.pem")``; None: the system's authorities.
            clock: seconds, for the cache.
        """
        if (discovery_url is None) == (snapshot_provider is None):
            raise ValueError("give exactly one of discovery_url and snapshot_provider")
        if snapshot_provider is not None and not callable(snapshot_provider):
            raise ValueError(f"snapshot_provider must be callable, got {snapshot_provider!r}")
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
        if not isinstance(cast("object", ssl), SSLContext | None):
            raise ValueError(f"ssl must be an ssl.SSLContext or None, got {ssl!r}")
        self._headers, self._ssl = checked(headers), ssl
        if snapshot_provider is not None:
            fetch = from_provider(snapshot_provider)
        else:
            fetch = from_url(valid_url(discovery_url or ""), self._open, self._headers)
            if gateway_url is None:  # a token for whoever answers discovery, not for whom it names
                self._headers = {
                    name: value
                    for name, value in self._headers.items()
                    if name.lower() != "authorization"
                }
        self._gateway = None if gateway_url is None else valid_url(gateway_url)
        self._timeout = timeout
        self._turns = asyncio.Semaphore(max_connections)
        self._resolver = RouteResolver()
        self._reader = SnapshotReader(fetch, cache_ttl, clock)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
        """The role's document in full, detached; not older than ``cache_ttl``.

        What was known is forgotten before it is read again, so that a discovery that fails leaves
        no address behind. Callers that wait for the same read share what it brings.

        Args:
            refresh: read it after this call, whatever is known.

        Raises:
            InferenceRoutingError: 503, what was read is no schema 2 document.
            TimeoutError: the deadline.
            Exception: whatever reading raises (``aiohttp.ClientError``, or the provider's own).
        """
        self._stay()
        async with asyncio.timeout(self._timeout):
            reading = await (self._reader.newer() if refresh else self._reader.latest())
        return reading.snapshot.to_dict()

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
            ValueError: the payload is no mapping, or asks for a stream, and nothing was sent; or
                the answer is no JSON object.
            RuntimeError: the client was used in another event loop before.
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

        ``path``: ``/generate``, ``/v1/chat/completions`` or ``/chat/completions``, which without a
        gateway is sent as the former. Every chunk is under the one deadline; after it the backend
        is hung up on and TimeoutError raised. Errors as :meth:`generate`.
        """
        if path not in _PATHS:
            raise ValueError(f"path must be one of {', '.join(_PATHS)}, got {path!r}")
        headers = over(self._headers, headers)
        _check(payload)
        self._stay()
        deadline = self._deadline()
        async with asyncio.timeout_at(deadline):
            await self._turns.acquire()
        try:
            async with asyncio.timeout_at(deadline):
                target = await self._select(payload, model, route_key, affinity_key, headers)
            async with self._sent(path, deadline, payload, target, affinity_key, headers) as answer:
                while chunk := await _read(answer, deadline):
                    yield chunk
        finally:
            self._turns.release()

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
        headers = over(self._headers, headers)
        _check(payload)
        if payload.get("stream"):
            raise ValueError("payload['stream'] asks for a stream: read it with client.stream()")
        self._stay()
        deadline = self._deadline()
        async with asyncio.timeout_at(deadline), self._turns:
            target = await self._select(payload, model, route_key, affinity_key, headers)
            async with self._sent(
                path, deadline, payload, target, affinity_key, headers
            ) as response:
                return _object(response, await response.read())

    def _stay(self) -> None:
        """In the event loop of the first call, which has the connections and whoever waits."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                "This InferenceClient belongs to another event loop. Make one in each loop (one"
                " asyncio.run around all calls), or call generate_with_discovery, which does."
            )

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _select(
        self,
        payload: Mapping[str, Any],
        model: str | None,
        route_key: str | None,
        affinity_key: str | None,
        headers: Mapping[str, str],
    ) -> RouteTarget:
        selectors: dict[str, Any] = {
            "model": payload.get("model") if model is None else model,
            "route_key": payload.get("route_key") if route_key is None else route_key,
            "affinity_key": named(headers, AFFINITY) if affinity_key is None else affinity_key,
        }
        reading: Reading | None = None
        try:
            reading = await self._reader.latest()
            return self._resolver.resolve(reading.snapshot, **selectors)
        except InferenceRoutingError as error:
            if error.status_code != 503:
                raise
        reading = await self._reader.newer(reading)
        return self._resolver.resolve(reading.snapshot, **selectors)

    @asynccontextmanager
    async def _sent(
        self,
        path: str,
        deadline: float,
        payload: Mapping[str, Any],
        target: RouteTarget,
        affinity_key: str | None,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The one POST. Any way out but a whole answer forgets what was known, and hangs up."""
        body = self._outgoing(path, payload, target)
        sent_headers = dict(headers)
        if affinity_key is not None and named(headers, AFFINITY) is None:
            sent_headers[AFFINITY] = affinity_key
        if self._gateway is None and path != _GENERATE:
            path = _CHAT  # engines and routers serve no other; a gateway has both
        address = endpoint_url(self._gateway or target.base_url, path)
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout_at(deadline):
                with speaking_http(address):
                    response = await self._open().post(
                        address, json=body, headers=sent_headers, allow_redirects=False
                    )
                await refuse_error(response)
            yield response
        except BaseException:
            self._reader.forget()
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

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = new_session(self._ssl)
        return self._session


async def _read(answer: aiohttp.ClientResponse, deadline: float) -> bytes:
    """The next chunk, empty at the end; what is there already does not outlive the deadline."""
    if asyncio.get_running_loop().time() >= deadline:
        raise TimeoutError
    async with asyncio.timeout_at(deadline):
        return await answer.content.readany()


def _object(response: aiohttp.ClientResponse, body: bytes) -> Document:
    """Raises ValueError: the answer is no JSON object."""
    answer: object = None
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(body)
    if not isinstance(answer, dict):
        shown = body[:_SHOWN].decode(errors="replace")
        raise ValueError(f"{response.url} answered no JSON object: {shown!r}")
    return cast("Document", answer)


def _check(payload: object) -> None:
    """Raises ValueError."""
    if not isinstance(payload, Mapping):
        raise ValueError(f"payload must be a mapping, got {type(payload).__name__}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
