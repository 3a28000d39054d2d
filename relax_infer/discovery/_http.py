"""What the client needs of HTTP: addresses, a session, errors that can be pickled."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from relax_infer.discovery._fields import url as valid_url

_KEEP_ALIVE = 3.0
"""Seconds. An SGLang server hangs up idle connections after 5; a POST must not meet that."""
_SECRET = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
_OWN = frozenset({"content-length", "transfer-encoding", "connection", "host", "expect", "upgrade"})
"""Headers that say where a request goes and ends, which is the client's to say."""
_ERROR_TEXT = 2000
"""Characters of an error's body that its exception carries."""


def endpoint_url(base: str, path: str) -> str:
    """``base`` (its own path kept) with ``path`` after it.

    Raises:
        ValueError: the path does not begin with a single slash, or has credentials, a query or a
            fragment.
    """
    parts = urlsplit(path)
    if not path.startswith("/") or path.startswith("//") or parts.query or parts.fragment:
        raise ValueError(f"path must be /like/this, without query or fragment: {path!r}")
    if any(c.isspace() or not c.isprintable() or c in "?#\\@" for c in path):
        raise ValueError(f"path has characters that do not belong there: {path!r}")
    return valid_url(base) + path


def new_session(ssl: SSLContext | None = None) -> aiohttp.ClientSession:
    """Without cookies, proxies, limits and deadlines of its own; of the running loop.

    aiohttp sends a request again by itself only when its method is idempotent, so never a POST.
    ``ssl``: whom to trust; None: the system's authorities.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEP_ALIVE,
            ttl_dns_cache=30,
            ssl=True if ssl is None else ssl,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
    )


@contextmanager
def speaking_http(address: str) -> Generator[None]:
    """Around one request: an answer that is no HTTP is a transport error.

    aiohttp makes it look like a 400 of the server's, and a caller would blame its own request.
    """
    try:
        yield
    except aiohttp.ClientResponseError as error:
        raise aiohttp.ClientPayloadError(
            f"{address} did not answer in HTTP: {error.message}"
        ) from error


async def refuse_error(response: aiohttp.ClientResponse) -> None:
    """Raise what is not a success, redirects included.

    Raises:
        aiohttp.ClientResponseError: with status, headers (``Retry-After``) and the body's text as
            message; unlike aiohttp's own it can be pickled, and so passes through Ray, and it does
        not carry the caller's token to wherever it is shown.
    """
    if response.status < 300:
        return
    text = await response.text(errors="replace")
    raise aiohttp.ClientResponseError(
        aiohttp.RequestInfo(
            response.request_info.url,
            response.request_info.method,
            _picklable(response.request_info.headers, but=_SECRET),
        ),
        (),
        status=response.status,
        message=text[:_ERROR_TEXT],
        headers=_picklable(response.headers),
    )


def named(headers: Mapping[str, str] | None, name: str) -> str | None:
    """A header's value, whatever the case of its name."""
    for key, value in (headers or {}).items():
        if key.lower() == name.lower():
            return value
    return None


def over(first: Mapping[str, str], last: Mapping[str, str] | None) -> dict[str, str]:
    """Both, whatever the case of their names; of two with one name the last.

    Raises ValueError as :func:`checked`, of ``last``.
    """
    if not last:
        return dict(first)
    last = checked(last)
    taken = {key.lower() for key in last}
    return {key: value for key, value in first.items() if key.lower() not in taken} | last


def checked(headers: Mapping[str, str] | None) -> dict[str, str]:
    """A copy, without those that are the client's own to say: who passes headers on that came with
    another request brings them along.

    Raises:
        ValueError: they are no mapping of strings to strings.
    """
    if headers is None:
        return {}
    given = cast("object", headers)
    if not isinstance(given, Mapping):
        raise ValueError(f"headers must be a mapping, got {type(given).__name__}")
    for key, value in cast("Mapping[object, object]", given).items():
        if not isinstance(key, str) or not isinstance(value, str):
            # Not the value: it may be a secret.
            raise ValueError(f"headers must map strings to strings; {key!r} does not")
    return {key: value for key, value in headers.items() if key.lower() not in _OWN}


def _picklable(
    headers: CIMultiDictProxy[str], but: frozenset[str] = frozenset()
) -> CIMultiDictProxy[str]:
    """A copy; the proxies that aiohttp gives cannot be pickled. ``but``: not these."""
    kept = [(key, value) for key, value in headers.items() if key.lower() not in but]
    return cast("CIMultiDictProxy[str]", CIMultiDict(kept))
