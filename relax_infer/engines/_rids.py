"""Request ids in the body of a request: read out of it, and put into it, with all else as it is."""

import json
from collections.abc import Mapping
from typing import cast

import msgspec

from relax_infer.engines._asgi import Refused
from relax_infer.engines._pairs import pairs
from relax_infer.gateway._limits import MOST_IDS, too_many_ids

_ENCODED = (b'"rid"', b"\\u", b"\0")
"""One of these is in every JSON document with the key: as it is, escaped, or in another coding."""
_MOST_QUOTES = 16 * MOST_IDS
"""Of what ``rid`` says; what has more is not read to count its ids."""


class _Payload(msgspec.Struct):
    rid: msgspec.Raw = msgspec.Raw(b"null")


_READER = msgspec.json.Decoder(_Payload)
_PYTHON = json.JSONDecoder(parse_int=len, parse_float=len)
"""No number is an id, so none is made of its digits. Python would refuse those of above 4,300."""


def request_ids(body: bytes) -> tuple[str, ...]:
    """Request ids that a payload names (``rid``: a string or a list of strings); none where it is
    no JSON, which the engine says better. No other value of it is made into an object.

    Raises:
        Refused: 400, it is nested too deeply, or has too many keys, lists or objects, to be looked
            through, or names too many.
    """
    if not any(each in body for each in _ENCODED):
        return ()
    try:
        rid = value_of(_written(body))
    except ValueError:
        return ()
    rids = cast("list[object]", rid) if isinstance(rid, list) else [rid]
    if len(rids) > MOST_IDS:
        raise Refused(400, too_many_ids(len(rids)))
    return tuple(each for each in rids if isinstance(each, str) and each)


def with_other_ids(body: bytes, others: Mapping[str, str]) -> bytes:
    """The payload with other request ids, and not a byte outside of ``rid`` changed: no number of
    it becomes another. Where ``rid`` is there twice, the last counts, as for every engine.

    Args:
        body: one that :func:`request_ids` found ids in.
        others: by the id that stands there; one that is not a key stays.

    Raises:
        Refused: 400, it cannot be read as text, or ``rid`` names something else than strings.
    """
    coding = json.detect_encoding(body)
    try:
        text = body.decode(coding, "surrogatepass")
        start, end = _place(text)
        rid = value_of(text[start:end])
    except ValueError:
        raise Refused(400, "Request body is not JSON") from None
    rids = cast("list[object]", rid) if isinstance(rid, list) else [rid]
    names = [others.get(each, each) for each in rids if isinstance(each, str)]
    if len(names) != len(rids):
        raise Refused(400, "rid must be a string, or a list of strings")
    written = json.dumps(names if isinstance(rid, list) else names[0])
    return (text[:start] + written + text[end:]).encode(coding, "surrogatepass")


def _written(body: bytes) -> str:
    """What stands at ``rid``. Raises ValueError: it is not there, or in no JSON."""
    try:
        return bytes(_READER.decode(body).rid).decode(errors="surrogatepass")
    except (msgspec.DecodeError, RecursionError):
        pass  # Python's reader takes more, and so may the engine
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    start, end = _place(text)
    return text[start:end]


def _place(text: str) -> tuple[int, int]:
    """Where the value of the last ``rid`` begins and ends. Raises ValueError: there is none."""
    found = [(start, end) for key, start, end in pairs(text) if key == "rid"]
    if not found:
        raise ValueError("no rid")
    return found[-1]


def value_of(written: str) -> object:
    """Of ``rid``; a number is how long it is written.

    Raises:
        ValueError: it is no JSON.
        Refused: 400, it names too many, or is nested too deeply.
    """
    if written.count('"') > _MOST_QUOTES or written.count(",") > _MOST_QUOTES:
        raise Refused(400, f"rid is longer than that of {MOST_IDS} requests")
    try:
        return _PYTHON.decode(written)
    except RecursionError:
        raise Refused(400, "Request body is nested too deeply") from None
