"""The gateway's HTTP client: one POST, never sent again; answers read as raw bytes."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
import yarl
from multidict import CIMultiDict

from relax_infer.gateway._errors import GatewayError

log = logging.getLogger(__name__)

_KEEP_ALIVE = 3.0
"""Seconds. An SGLang server hangs up idle connections after 5; a POST must not meet that."""
_CONNECT_TIMEOUT = 10.0
_ABORT_TIMEOUT = 5.0
_GET_TIMEOUT = 5.0


class Upstream:
    """Connections to the engines and routers, kept open between requests."""

    def __init__(self, max_connections: int) -> None:
        self._limit = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, yarl.URL] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def post(
        self,
        base_url: str,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        decompress: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send once; the caller closes the answer. ``decompress``: undo its content encoding.

        Raises:
            GatewayError: 502, the backend cannot be reached.
        """
        try:
            return await self._open().post(
                self._url(base_url + path),
                headers=headers,
                data=body,
                allow_redirects=False,
                auto_decompress=decompress,
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("POST %s%s: %s %s", base_url, path, type(error).__name__, error)
            raise GatewayError(502, "Inference backend is unavailable") from error

    async def get(self, base_url: str, path: str) -> Any:
        """An engine's JSON about itself.

        Raises:
            GatewayError: 502.
        """
        try:
            async with self._open().get(
                self._url(base_url + path),
                timeout=aiohttp.ClientTimeout(total=_GET_TIMEOUT),
                allow_redirects=False,
                auto_decompress=True,
            ) as answer:
                answer.raise_for_status()
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("GET %s%s: %s %s", base_url, path, type(error).__name__, error)
            raise GatewayError(502, "Inference backend is unavailable") from error

    def abort(self, base_urls: Iterable[str], rids: Iterable[str]) -> None:
        """Tell the engines that nobody waits for these requests any more; best effort.

        Closing the connection already tells them, and an engine's fence acts on it; this is for
        requests that are behind a router. Proof that an engine is idle is another matter.
        """
        for base_url in base_urls:
            for rid in rids:
                task = asyncio.create_task(self._abort(base_url, rid))
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Send the aborts that are under way, then hang up."""
        await asyncio.gather(*self._aborts)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _abort(self, base_url: str, rid: str) -> None:
        try:
            async with self._open().post(
                self._url(base_url + "/abort_request"),
                json={"rid": rid},
                timeout=aiohttp.ClientTimeout(total=_ABORT_TIMEOUT),
                allow_redirects=False,
            ) as answer:
                if answer.status >= 400:
                    log.warning("abort of %s at %s answered %d", rid, base_url, answer.status)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("abort of %s at %s: %s %s", rid, base_url, type(error).__name__, error)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._limit, keepalive_timeout=_KEEP_ALIVE, ttl_dns_cache=30
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _url(self, text: str) -> yarl.URL:
        """Parsed once per address."""
        url = self._urls.get(text)
        if url is None:
            if len(self._urls) > 4096:
                self._urls.clear()
            url = self._urls[text] = yarl.URL(text, encoded=True)
        return url
