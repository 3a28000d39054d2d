"""A caller's JSON payload: what the gateway reads of it, and what it sends on.

Only the keys that the gateway needs are decoded; everything else is copied as it stands, which is
exact for large integers and for the spelling of floats. A long list of token ids is not even looked
through: 64 KB take 16 microseconds, and would take 58 to be checked and some 150 to be decoded.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from relax_infer.gateway._errors import GatewayError
from relax_infer.gateway._limits import MOST_IDS, too_many_ids

Fields = dict[str, msgspec.Raw]

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
_rid = msgspec.json.Decoder(str | list[str])
_messages = msgspec.json.Decoder(list[dict[str, Any]])
_parameters = msgspec.json.Decoder(dict[str, Any] | None)
_any = msgspec.json.Decoder(msgspec.Raw)
_encoder = msgspec.json.Encoder()

_COMPACT, _SPACED = (b":", b","), (b": ", b", ")
"""What stands between a key and its value, and between two pairs."""
_KEYS = {
    key: _encoder.encode(key)
    for key in (
        *("model", "route_key", "rid", "stream", "text", "input_ids", "sampling_params"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "messages", "max_tokens"),
        *("temperature", "top_p", "seed", "n", "stop", "return_text_in_logprobs"),
    )
}

_TOKENS = b'"input_ids":'
_LARGE = 4096
"""Bytes of a payload from which on it pays to look for its tokens."""
_HUGE = 1 << 20
"""Bytes from which on a payload can have so many keys that to read them is too much."""

MOST_KEYS = 10_000
"""Keys of a payload. Callers send some twenty."""
_MOST_MARKS = 1_000_000
"""Strings, lists and objects of a payload that are looked at to count its keys."""
_QUOTE = ord('"')
_ENDS = b",}"
_SPACE = re.compile(rb"[ \t\n\r]*")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LEAVES = rb'(?:[\[{][^\]\[{}"]*+(?:"(?:[^"\\]++|\\.)*+"[^\]\[{}"]*+)*+[\]}][ \t\n\r,]*+)++'
"""Lists and objects in a row that have none inside: the bulk of a large payload, in one go."""
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"|' + _LEAVES + rb"|[\]\[{}]", re.DOTALL)

_NOT_JSON = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class Selectors(NamedTuple):
    """What every payload may say about where it goes."""

    model: str | None
    route_key: str | None
    rids: tuple[str, ...]
    """Ids under which the engine knows the request, if the caller chose them."""


class RawRequest(NamedTuple):
    """A checked payload for an engine's ``/generate``."""

    to: Selectors
    stream: bool
    body: bytes
    """The payload without ``model`` and ``route_key``."""


@dataclass(frozen=True)
class MessagesRequest:
    """Messages for a judge; the gateway makes the prompt."""

    to: Selectors
    messages: list[dict[str, Any]]
    sampling_params: dict[str, Any] | None


@dataclass(frozen=True)
class ChatRequest:
    """A checked payload of the OpenAI chat route."""

    to: Selectors
    stream: bool
    fields: Fields
    """Without ``model`` and ``route_key``."""

    def body(self, served_name: str) -> bytes:
        """The payload under the name that the backend itself answers to."""
        return _encoder.encode(self.fields | {"model": msgspec.Raw(_encoder.encode(served_name))})


def read_generate(body: bytes) -> RawRequest | MessagesRequest:
    """Check and rewrite a payload of ``/generate``.

    Raises:
        GatewayError: 400, before any backend is asked.
    """
    fields = read_object(body)
    named = len(fields)
    to = _selectors(fields)
    stream = is_stream(fields)
    raw = "input_ids" in fields or "text" in fields
    if raw and "messages" in fields:
        raise GatewayError(400, "Send either messages or input_ids/text, not both")
    if raw:
        return RawRequest(to, stream, body if len(fields) == named else _written(fields, *_COMPACT))
    if "messages" not in fields:
        raise GatewayError(400, "Send input_ids or text")
    if stream:
        raise GatewayError(400, "messages are answered whole: stream must be false")
    return MessagesRequest(to, _read_messages(fields), _read_parameters(fields))


def read_chat(body: bytes) -> ChatRequest:
    """Check a payload of the chat route; its messages are left to the backend.

    Raises:
        GatewayError: 400, before any backend is asked.
    """
    fields = read_object(body)
    to = _selectors(fields)
    if bytes(fields.get("messages", msgspec.Raw(b"")))[:1] != b"[":
        raise GatewayError(400, "messages must be a list")
    return ChatRequest(to, is_stream(fields), fields)


def read_object(body: bytes) -> Fields:
    """The payload's keys with their values as they stand.

    Raises:
        GatewayError: 400, not one JSON object in UTF-8, or with a key that is there twice.
    """
    try:
        if not body.isascii():
            body.decode()  # values are skipped over unread, wrong bytes in them too
        if len(body) > _HUGE and body.count(b":") > MOST_KEYS:
            _refuse_many_keys(body)
        if len(body) > _LARGE and (around := _around_tokens(body)) is not None:
            return around
        fields = _object.decode(body)
    except msgspec.ValidationError:
        raise GatewayError(400, "Request body must be a JSON object") from None
    except _NOT_JSON:
        raise GatewayError(400, "Request body is not JSON") from None
    if len(fields) > MOST_KEYS:
        raise GatewayError(400, f"Request body has more than {MOST_KEYS} keys")
    if not _is_plain(body, fields):
        _refuse_doubled_keys(body, fields)
    return fields


def _around_tokens(body: bytes) -> Fields | None:
    """The keys of a payload whose bulk is one flat list of tokens, which is left to the engine.

    Its text has no quote and no bracket, so it ends where every parser sees its end, whatever else
    is in it. None: the payload is something else, or is spaced in an uncommon way.
    """
    key = body.find(_TOKENS)
    start = body.find(b"[", key + len(_TOKENS), key + len(_TOKENS) + 2)
    end = body.find(b"]", start)
    if key < 0 or start < 0 or end < 0:
        return None
    tokens = body[start : end + 1]
    if b'"' in tokens or b"{" in tokens or tokens.find(b"[", 1) > 0:
        return None
    try:
        fields = _object.decode(body[: start + 1] + body[end:])
    except msgspec.DecodeError:  # whoever reads all of it says what is wrong
        return None
    if bytes(fields.get("input_ids", b"")) != b"[]":
        return None
    fields["input_ids"] = msgspec.Raw(tokens)
    return fields if _is_plain(body, fields) else None


def is_stream(fields: Fields) -> bool:
    """Raises GatewayError: 400, ``stream`` is there and not a bool."""
    stream = bytes(fields["stream"]) if "stream" in fields else b"false"
    if stream not in (b"true", b"false"):
        raise GatewayError(400, "stream must be a bool")
    return stream == b"true"


def rids_of(fields: Fields) -> tuple[str, ...]:
    """Empty ids are left out: an engine takes an empty id for every id.

    Raises:
        GatewayError: 400, they are too many.
    """
    value = fields.get("rid")
    if value is None:
        return ()
    try:
        rid = _rid.decode(value)
    except msgspec.DecodeError:  # the engine refuses it with its own words
        return ()
    if isinstance(rid, str):
        return (rid,) if rid else ()
    if len(rid) > MOST_IDS:
        raise GatewayError(400, too_many_ids(len(rid)))
    return tuple(each for each in rid if each)


def is_json(body: bytes) -> bool:
    """Whether an engine's answer is one JSON value."""
    try:
        _any.decode(body)
    except _NOT_JSON:
        return False
    return True


def _selectors(fields: Fields) -> Selectors:
    """Takes ``model`` and ``route_key`` out."""
    return Selectors(_selector(fields, "model"), _selector(fields, "route_key"), rids_of(fields))


def _selector(fields: Fields, name: str) -> str | None:
    """Take the field out; null counts as absent."""
    value = fields.pop(name, None)
    if value is None or bytes(value) == b"null":
        return None
    try:
        return _text.decode(value)
    except msgspec.DecodeError:
        raise GatewayError(400, f"{name} must be a non-empty string") from None


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    try:
        return _messages.decode(fields["messages"])
    except _NOT_JSON:
        raise GatewayError(400, "messages must be a list of objects") from None


def _read_parameters(fields: Fields) -> dict[str, Any] | None:
    try:
        return _parameters.decode(fields.get("sampling_params", b"null"))
    except _NOT_JSON:
        raise GatewayError(400, "sampling_params must be an object or null") from None


def _is_plain(body: bytes, fields: Fields) -> bool:
    """Whether the body is written as two common encoders write it, so that no key is doubled."""
    styles = (_SPACED, _COMPACT) if body.find(b'": ', 0, 128) > 0 else (_COMPACT, _SPACED)
    return any(_written(fields, *style) == body for style in styles)


def _written(fields: Fields, colon: bytes, comma: bytes) -> bytes:
    """Keys and values as an encoder writes them. Values, which may be large, are copied once."""
    parts: list[bytes | msgspec.Raw] = []
    before = b"{"
    for key, value in fields.items():
        parts += (before, _KEYS.get(key) or _encoder.encode(key), colon, value)
        before = comma
    parts.append(b"}" if fields else b"{}")
    return b"".join(parts)


def _refuse_doubled_keys(body: bytes, fields: Fields) -> None:
    """Of two equal keys the gateway could read one and the engine the other.

    Nothing is decoded for it but the keys: the value that was found for a key, the last one, stands
    at each place of that key, or the key is there twice.
    """
    seen: set[str] = set()
    at = _after_space(body, 0)
    while (at := _after_space(body, at + 1)) < len(body) and body[at] == _QUOTE:
        written = cast("re.Match[bytes]", _STRING.match(body, at))
        key = _text.decode(written[0])
        at = _after_space(body, _after_space(body, written.end()) + 1)
        end = at + len(memoryview(fields[key]))
        following = _after_space(body, end)
        if key in seen or body[at:end] != bytes(fields[key]) or body[following] not in _ENDS:
            raise GatewayError(400, f"The key {key!r} is there twice")
        seen.add(key)
        at = following


def _refuse_many_keys(body: bytes) -> None:
    """Millions of keys would be gigabytes when they are read. Where there are so many colons, keys
    are counted before, up to twice the limit: which strings are values is not looked at."""
    depth = strings = 0
    for number, mark in enumerate(_MARK.finditer(body, body.find(b"{") + 1)):
        if number == _MOST_MARKS:
            raise GatewayError(400, f"Request body has more than {number} lists and objects")
        first = body[mark.start()]
        if first != _QUOTE:
            alone = mark.end() - mark.start() == 1
            depth += alone and (1 if first in b"{[" else -1)
        elif depth == 0:
            strings += 1
            if strings > 2 * MOST_KEYS:
                raise GatewayError(400, f"Request body has more than {MOST_KEYS} keys")


def _after_space(body: bytes, at: int) -> int:
    """Of the next byte that is no space."""
    return cast("re.Match[bytes]", _SPACE.match(body, at)).end()
