"""A raw generation payload: what the gateway reads of it, and what it sends on.

Only the keys that the gateway needs are decoded; everything else is copied as it stands, which is
exact for large integers and for the spelling of floats, and four times as fast as decoding token
ids (34 instead of 147 microseconds for 64 KB).
"""

from dataclasses import dataclass

import msgspec

from relax_infer.gateway._errors import GatewayError

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_rid = msgspec.json.Decoder(str | list[str])
_any = msgspec.json.Decoder(msgspec.Raw)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class RawRequest:
    """A checked payload for an engine's ``/generate``."""

    model: str | None
    route_key: str | None
    stream: bool
    rids: tuple[str, ...]
    """Ids under which the engine knows the request, if the caller chose them."""
    body: bytes
    """The payload without ``model`` and ``route_key``."""


def read_raw(body: bytes) -> RawRequest:
    """Check and rewrite one payload.

    Raises:
        GatewayError: 400, before any backend is asked.
    """
    try:
        fields = _object.decode(body)
    except msgspec.ValidationError:
        raise GatewayError(400, "Request body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise GatewayError(400, "Request body is not JSON") from None
    model, route_key = _selector(fields, "model"), _selector(fields, "route_key")
    stream = bytes(fields["stream"]) if "stream" in fields else b"false"
    if stream not in (b"true", b"false"):
        raise GatewayError(400, "stream must be a bool")
    raw = "input_ids" in fields or "text" in fields
    if raw and "messages" in fields:
        raise GatewayError(400, "Send either messages or input_ids/text, not both")
    if "messages" in fields:
        raise GatewayError(400, "messages are not served here; send input_ids or text")
    if not raw:
        raise GatewayError(400, "Send input_ids or text")
    return RawRequest(
        model, route_key, stream == b"true", _rids(fields.get("rid")), _encoder.encode(fields)
    )


def is_json(body: bytes) -> bool:
    """Whether an engine's answer is one JSON value."""
    try:
        _any.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _selector(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    """Take the field out; null counts as absent."""
    value = fields.pop(name, None)
    if value is None or bytes(value) == b"null":
        return None
    try:
        return _text.decode(value)
    except msgspec.DecodeError:
        raise GatewayError(400, f"{name} must be a non-empty string") from None


def _rids(value: msgspec.Raw | None) -> tuple[str, ...]:
    """Empty ids are left out: an engine takes an empty id for every id."""
    if value is None:
        return ()
    try:
        rid = _rid.decode(value)
    except msgspec.DecodeError:  # the engine refuses it with its own words
        return ()
    return tuple(each for each in ([rid] if isinstance(rid, str) else rid) if each)
