"""The judge's client from before discovery: messages in, words out, with finite retries."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from relax_infer.discovery.client import endpoint_url

PAUSES = (0.5, 1.0)
"""Seconds after the first and the second attempt."""
CONNECTIONS = 2048


class GenRMClient:
    """Asks a gateway's ``/genrm/generate``. Use it as an async context manager, in one event loop.

    Unlike :class:`relax_infer.discovery.InferenceClient` it sends a request again when the answer
    was lost or a 5xx, so a judge may be asked more than once for one answer. Scores of a run do not
    go through it.
    """

    def __init__(self, url: str, *, timeout: float = 300.0) -> None:
        """
        Args:
            url: of the judge's role, with or without slashes at its end.
            timeout: seconds for one attempt.
        """
        self._url = endpoint_url(url.rstrip("/"), "/generate")
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        sampling_params: dict[str, Any] | None = None,
        route_key: str | None = None,
    ) -> str:
        """The judge's words.

        Raises:
            aiohttp.ClientResponseError: a 4xx at once; a 5xx after the last attempt.
            aiohttp.ClientError, TimeoutError: no attempt was answered.
            ValueError: the answer has no ``response``.
        """
        if self._session is None:
            raise RuntimeError("use GenRMClient as an async context manager: async with ... as c")
        body: dict[str, Any] = {"messages": list(messages)}
        if sampling_params is not None:
            body["sampling_params"] = sampling_params
        if route_key is not None:
            body["route_key"] = route_key
        for pause in PAUSES:
            try:
                return await self._ask(self._session, body)
            except aiohttp.ClientResponseError as error:
                if error.status < 500:
                    raise
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(pause)
        return await self._ask(self._session, body)

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        async with session.post(self._url, json=body, raise_for_status=True) as answer:
            document = await answer.json()
        response = document.get("response") if isinstance(document, dict) else None
        if not isinstance(response, str):
            raise ValueError(f"{self._url} answered without a response: {document!r:.200}")
        return response
