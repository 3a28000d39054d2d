"""The gateway's HTTP client: one POST, never sent again; answers read as raw bytes."""

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import yarl

from relax_infer.gateway._aborts import AT_ONCE, Aborts
from relax_infer.gateway._asgi import JSON, Headers
from relax_infer.gateway._connection import Broken, Response, Sink
from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._pool import Origin, Pool

log = logging.getLogger(__name__)

_ABORT_TIMEOUT = 5.0
_GET_TIMEOUT = 5.0
_LINES = 4
"""Of a head without the caller's headers: request, host, length, and the empty one."""
_FAILURES = (Broken, OSError, ValueError)


class _Target(NamedTuple):
    """A parsed address."""

    origin: Origin
    head: bytes
    """What follows the method: path, version and host."""


class Upstream:
    """Connections to the engines and routers, kept open between requests."""

    def __init__(self, max_connections: int) -> None:
        self._pool = Pool(max_connections)
        self._targets: dict[tuple[str, str], _Target] = {}
        self._aborts = Aborts(self._abort)
        self._abort_pool = Pool(AT_ONCE)

    async def post(self, base_url: str, path: str, headers: Headers, body: bytes) -> Response:
        """Send once; the caller closes the answer.

        Raises:
            GatewayError: 502, the backend cannot be reached.
        """
        return await self.request("POST", base_url, path, headers, body)

    async def request(
        self, method: str, base_url: str, path: str, headers: Headers, body: bytes
    ) -> Response:
        """The same with any method whose answer has a body: not HEAD, not CONNECT."""
        try:
            return await self._send(method.encode(), base_url, path, headers, body)
        except _FAILURES as error:
            raise _unavailable(method, base_url, path, error) from error

    def ask(
        self, base_url: str, path: str, headers: Headers, body: bytes, sink: Sink
    ) -> asyncio.Task[None] | None:
        """POST once; the answer, or that there is none, is told to ``sink``.

        Returns:
            What waits for a connection, to be cancelled if the request is not wanted any more;
            None: the request has been sent.

        Raises:
            GatewayError: 502, it cannot be sent.
        """
        try:
            origin, head = self._head(b"POST", base_url, path, headers, body)
            if self._pool.send_now(origin, head, body, sink):
                return None
        except _FAILURES as error:
            raise _unavailable("POST", base_url, path, error) from error
        return asyncio.create_task(self._ask_soon(base_url, path, origin, head, body, sink))

    async def get(self, base_url: str, path: str) -> Any:
        """An engine's JSON about itself.

        Raises:
            GatewayError: 502.
        """
        try:
            async with asyncio.timeout(_GET_TIMEOUT):
                answer = await self._send(b"GET", base_url, path, (), b"")
                try:
                    if answer.status != 200:
                        raise ValueError(f"it answered {answer.status}")
                    return json.loads(await answer.read())
                finally:
                    answer.close()
        except _FAILURES as error:
            raise _unavailable("GET", base_url, path, error) from error

    def hold(self, rids: Iterable[str]) -> None:
        """A request under these ids begins; :meth:`let_go` must be called once for it."""
        self._aborts.hold(rids)

    def let_go(self, rids: Iterable[str]) -> None:
        """The request that :meth:`hold` was called for has ended."""
        self._aborts.let_go(rids)

    def abort(self, base_urls: Iterable[str], rids: Iterable[str]) -> None:
        """Tell the engines that nobody waits for these requests any more; best effort.

        Closing the connection already tells them, and an engine's fence acts on it; this is for
        requests that are behind a router. Proof that an engine is idle is another matter. An id
        that another request of this process holds is aborted when that one has ended.
        """
        self._aborts.put(base_urls, rids)

    async def close(self) -> None:
        """Send the aborts that are under way, then hang up."""
        await self._aborts.close()
        self._abort_pool.close()
        self._pool.close()

    async def _abort(self, base_url: str, rid: str) -> None:
        body = json.dumps({"rid": rid}).encode()
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                origin, head = self._head(b"POST", base_url, "/abort_request", (JSON,), body)
                answer = await self._abort_pool.send(origin, head, body)
                try:
                    if answer.status >= 400:
                        log.warning("abort of %s at %s answered %d", rid, base_url, answer.status)
                    await answer.read()
                finally:
                    answer.close()
        except _FAILURES as error:
            log.warning("abort of %s at %s: %s %s", rid, base_url, type(error).__name__, error)

    async def _send(
        self, method: bytes, base_url: str, path: str, headers: Headers, body: bytes
    ) -> Response:
        """Raises Broken, OSError, ValueError."""
        origin, head = self._head(method, base_url, path, headers, body)
        return await self._pool.send(origin, head, body)

    async def _ask_soon(
        self, base_url: str, path: str, origin: Origin, head: bytes, body: bytes, sink: Sink
    ) -> None:
        try:
            await self._pool.send_soon(origin, head, body, sink)
        except _FAILURES as error:
            _unavailable("POST", base_url, path, error)
            sink.over(Broken(str(error)))

    def _head(
        self, method: bytes, base_url: str, path: str, headers: Headers, body: bytes
    ) -> tuple[Origin, bytes]:
        """Raises ValueError."""
        target = self._targets.get((base_url, path)) or self._parse(base_url, path)
        lines = [b"%b: %b\r\n" % pair for pair in headers]
        head = b"%b %bcontent-length: %d\r\n%b\r\n" % (
            method,
            target.head,
            len(body),
            b"".join(lines),
        )
        # Servers let no such header through to us; this is the last place to see one.
        ends = len(lines) + _LINES
        if not ends == head.count(b"\n") == head.count(b"\r") or b"\0" in head:
            raise ValueError("a header has a character that no header may have")
        return target.origin, head

    def _parse(self, base_url: str, path: str) -> _Target:
        """Done once per address."""
        url = yarl.URL(base_url + path)
        if url.raw_host is None or url.port is None:
            raise ValueError(f"{base_url} names no host")
        host = f"[{url.raw_host}]" if ":" in url.raw_host else url.raw_host
        line = f"{url.raw_path_qs} HTTP/1.1\r\nhost: {host}"
        line += "\r\n" if url.is_default_port() else f":{url.port}\r\n"
        target = _Target(Origin(url.raw_host, url.port, url.scheme == "https"), line.encode())
        if len(self._targets) > 4096:
            self._targets.clear()
        self._targets[base_url, path] = target
        return target


def _unavailable(method: str, base_url: str, path: str, error: Exception) -> GatewayError:
    log.warning("%s %s%s: %s %s", method, base_url, path, type(error).__name__, error)
    return GatewayError(502, "Inference backend is unavailable")
