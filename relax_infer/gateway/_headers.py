"""Which headers pass the gateway."""

from relax_infer.gateway._asgi import JSON, Headers

Sent = list[tuple[bytes, bytes]]
"""Headers on their way to a backend."""

AFFINITY = b"X-SMG-Routing-Key"
"""The caller's affinity key, for the resolver and for sglang-router alike."""

_AFFINITY = AFFINITY.lower()
_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_NOT_SENT_ON = _HOP | {b"host", b"content-length", b"expect"}
_NOT_SENT_BACK = {
    (buffered, decoded): _HOP
    | (frozenset({b"content-length"}) if buffered else frozenset())
    | (frozenset({b"content-encoding"}) if decoded else frozenset())
    for buffered in (False, True)
    for decoded in (False, True)
}
"""By (buffered, decoded)."""


def to_backend(headers: Headers) -> Sent:
    """Without those of this hop, those named in ``Connection``, and what the client recomputes."""
    kept = [
        (AFFINITY if name == _AFFINITY else key, value)
        for name, key, value in _passed_on(headers, _NOT_SENT_ON)
    ]
    if not any(len(key) == 12 and key.lower() == b"content-type" for key, _ in kept):
        kept.append(JSON)
    return kept


def to_caller(
    headers: Headers, *, buffered: bool, decoded: bool = True
) -> list[tuple[bytes, bytes]]:
    """The backend's headers; ``buffered``: the body is sent whole, with a length of its own.

    ``decoded``: its content encoding was undone.
    """
    dropped = _NOT_SENT_BACK[buffered, decoded]
    return [(name, value) for name, _, value in _passed_on(headers, dropped)]


def affinity_of(sent: Sent) -> str | None:
    """The first of them, as text: UTF-8 where it is."""
    for key, value in sent:
        if key is AFFINITY:
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value.decode("latin-1")
    return None


def _passed_on(headers: Headers, dropped: frozenset[bytes]) -> list[tuple[bytes, bytes, bytes]]:
    """Of each header that stays: its name in lower case, its name as it was written, its value."""
    kept: list[tuple[bytes, bytes, bytes]] = []
    named: list[bytes] = []
    for key, value in headers:
        name = key.lower()
        if name not in dropped:
            kept.append((name, key, value))
        elif name == b"connection":
            named += value.lower().split(b",")
    if not named:
        return kept
    also = {name.strip() for name in named}
    return [each for each in kept if each[0] not in also]
