"""The two places that a client reads a role's document from: a function, or a role's address."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from relax_infer.discovery._http import endpoint_url, refuse_error, speaking_http
from relax_infer.discovery._reader import Known
from relax_infer.discovery.resolver import valid_snapshot
from relax_infer.discovery.schema import RoleSnapshot

READ_SECONDS = 15.0
"""That one read over HTTP may take: a connection that is dead must not hold up everybody who waits
for it. A discovery of several managers gives each of them 10."""

SnapshotProvider = Callable[[], Awaitable[RoleSnapshot | Mapping[str, Any]]]
Fetch = Callable[[Known | None], Awaitable[Known]]


def from_provider(provider: SnapshotProvider) -> Fetch:
    """Asks the function, every time."""

    async def fetch(_: Known | None) -> Known:
        return Known(valid_snapshot(await provider()))

    return fetch


def from_url(
    role_url: str,
    session: Callable[[], aiohttp.ClientSession],
    headers: Mapping[str, str],
) -> Fetch:
    """``GET <role_url>/engines?schema=2``, conditional on the last answer's entity tag.

    ``headers`` go with every read, but for an ``If-None-Match``, which is the reader's own.

    Raises ``aiohttp.ClientError`` for a status that is no success, and for one that cannot be
    reached or does not answer in time (``ServerTimeoutError``); InferenceRoutingError (503) for an
    answer that is no schema 2 document.
    """
    address = endpoint_url(role_url, "/engines")
    own = {key: value for key, value in headers.items() if key.lower() != "if-none-match"}

    async def read(known: Known | None) -> Known | tuple[bytes, str | None]:
        """What is known already, or a body and its tag."""
        tag = None if known is None else known.etag
        headers = own if tag is None else own | {"If-None-Match": tag}
        with speaking_http(address):
            response = await session().get(
                address, params={"schema": "2"}, headers=headers, allow_redirects=False
            )
        async with response:
            if response.status == 304 and known is not None and tag is not None:
                return known
            await refuse_error(response)
            return await response.read(), response.headers.get("ETag")

    async def fetch(known: Known | None) -> Known:
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await read(known)
        except TimeoutError as error:
            raise aiohttp.ServerTimeoutError(
                f"{address} did not answer within {READ_SECONDS:g} s"
            ) from error
        if isinstance(found, Known):
            return found
        body, tag = found
        try:
            document: object = json.loads(body)
        except ValueError:
            document = None
        return Known(valid_snapshot(document), tag)

    return fetch
