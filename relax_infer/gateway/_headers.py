"""Which headers pass the gateway."""

from collections.abc import Iterable

from multidict import CIMultiDict

from relax_infer.gateway._asgi import Headers

AFFINITY = "X-SMG-Routing-Key"
"""The caller's affinity key, for the resolver and for sglang-router alike."""

_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_NOT_SENT_ON = _HOP | {b"host", b"content-length", b"expect"}


def to_backend(headers: Headers) -> CIMultiDict[str]:
    """Without those of this hop, those named in ``Connection``, and what the client recomputes."""
    pairs = list(headers)
    dropped = _NOT_SENT_ON | _named_in_connection(pairs)
    kept: CIMultiDict[str] = CIMultiDict()
    for key, value in pairs:
        name = key.lower()
        if name not in dropped:
            decoded = AFFINITY if name == AFFINITY.lower().encode() else key.decode("latin-1")
            kept.add(decoded, _decoded(value))
    kept.setdefault("Content-Type", "application/json")
    return kept


def to_caller(
    headers: Headers, *, buffered: bool, decoded: bool = True
) -> list[tuple[bytes, bytes]]:
    """The backend's headers; ``buffered``: the body is sent whole, with a length of its own.

    ``decoded``: its content encoding was undone.
    """
    pairs = [(key.lower(), value) for key, value in headers]
    dropped = _HOP | _named_in_connection(pairs)
    if buffered:
        dropped |= {b"content-length"}
    if decoded:
        dropped |= {b"content-encoding"}
    return [(key, value) for key, value in pairs if key not in dropped]


def affinity_of(headers: CIMultiDict[str]) -> str | None:
    return headers.get(AFFINITY)


def _named_in_connection(pairs: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    lists = [value for key, value in pairs if key.lower() == b"connection"]
    return frozenset(name.strip().lower() for value in lists for name in value.split(b","))


def _decoded(value: bytes) -> str:
    """As text that the HTTP client turns into the same bytes where it can."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
