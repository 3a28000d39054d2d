"""One client per event loop and settings, for callers that have nowhere to keep one."""

import asyncio
import weakref
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any

from relax_infer.discovery._fields import url as valid_url
from relax_infer.discovery._http import checked
from relax_infer.discovery.client import MAX_CONNECTIONS, Document, InferenceClient

_Key = tuple[str, float, int, frozenset[tuple[str, str]], SSLContext | None]
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
    client_headers: Mapping[str, str] | None = None,
    ssl: SSLContext | None = None,
) -> Document:
    """:meth:`InferenceClient.generate` with one client per event loop, address and settings.

    Affinity is read from the header ``X-SMG-Routing-Key``. Close the loop's clients with
    :func:`close_loop_inference_clients` before the loop ends.

    Args:
        headers: of this request; they may be others each time.
        client_headers: the client's own ``headers``, such as a token, which discovery gets too;
            each other set of them makes another client, as ``ssl`` does.

    Raises:
        ValueError: an argument is not as :class:`InferenceClient` takes it; else as its
            ``generate``.
    """
    loop = asyncio.get_running_loop()
    mine = _clients.get(loop)
    if mine is None:
        _forget_ended_loops()
        mine = _clients[loop] = {}
    own = checked(client_headers)
    named = frozenset((name.lower(), value) for name, value in own.items())
    key = (valid_url(discovery_url), timeout, max_connections, named, ssl)
    if key not in mine:
        mine[key] = InferenceClient(
            discovery_url=discovery_url,
            timeout=timeout,
            max_connections=max_connections,
            headers=own,
            ssl=ssl,
        )
    return await mine[key].generate(payload, model=model, headers=headers)


async def close_loop_inference_clients() -> None:
    """Close every client that :func:`generate_with_discovery` made in the running loop."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.close()


def _forget_ended_loops() -> None:
    """A client's connections hold their loop, so an entry does not go by itself."""
    for loop in [loop for loop in _clients if loop.is_closed()]:
        del _clients[loop]
