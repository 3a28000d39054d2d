"""The two places that a client reads a role's document from: a function, or a role's address."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from relax_infer.discovery._http import endpoint_url, refuse_error, speaking_http
from relax_infer.discovery._reader import Known
from relax_infer.discovery.resolver import valid_snapshot
from relax_infer.discovery.schema import RoleSnapshot

SnapshotProvider = Callable[[], Awaitable[RoleSnapshot | Mapping[str, Any]]]
Fetch = Callable[[Known | None], Awaitable[Known]]


def from_provider(provider: SnapshotProvider) -> Fetch:
    """Asks the function, every time."""

    async def fetch(_: Known | None) -> Known:
        return Known(valid_snapshot(await provider()))

    return fetch


def from_url(role_url: str, session: Callable[[], aiohttp.ClientSession]) -> Fetch:
    """``GET <role_url>/engines?schema=2``, conditional on the last answer's entity tag.

    Raises ``aiohttp.ClientError`` for a status that is no success, and for one that cannot be
    reached; InferenceRoutingError (503) for an answer that is no schema 2 document.
    """
    address = endpoint_url(role_url, "/engines")

    async def fetch(known: Known | None) -> Known:
        tag = None if known is None else known.etag
        headers = {} if tag is None else {"If-None-Match": tag}
        with speaking_http(address):
            response = await session().get(
                address, params={"schema": "2"}, headers=headers, allow_redirects=False
            )
        async with response:
            if response.status == 304 and known is not None and tag is not None:
                return known
            await refuse_error(response)
            body = await response.read()
        try:
            document: object = json.loads(body)
        except ValueError:
            document = None
        return Known(valid_snapshot(document), response.headers.get("ETag"))

    return fetch
