"""Request ids in the body of a request: read out of it, and put into it, with all else as it is."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from relax_infer.gateway._limits import MOST_IDS, too_many_ids

_ESCAPED = (b"\\u", b"\0")
_ENCODED = (b'"rid"', *_ESCAPED)
"""One of these is in every JSON document with the key: as it is, escaped, or in another coding."""
_SPACE = " \t\n\r"


class _Payload(msgspec.Struct):
    rid: Any = None


_READER = msgspec.json.Decoder(_Payload)
_PYTHON = json.JSONDecoder(parse_int=len, parse_float=len)
"""Reads what Python reads, which is more. No number is an id, so none is made of its digits: Python
would refuse those of more than 4,300."""


class Refused(Exception):
    """What a caller sent is at fault; the engine does not hear of it."""

    def __init__(
        self, status: int, detail: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(status, detail, headers)
        self.status, self.detail, self.headers = status, detail, headers


def request_ids(body: bytes) -> tuple[str, ...]:
    """Request ids that a payload names (``rid``: a string or a list of strings); none where it is
    no JSON, which the engine says better.

    Raises:
        Refused: 400, it is nested too deeply to be read, or names too many.
    """
    if not any(each in body for each in _ENCODED):
        return ()
    rid = _rid(body)
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
        Refused: 400, Python reads it otherwise than was found, or ``rid`` names something else
            than strings.
    """
    coding = json.detect_encoding(body)
    try:
        text = body.decode(coding, "surrogatepass")
        rid = _document(text).get("rid")
        start, end = _place(text, "rid")
    except ValueError:
        raise Refused(400, "Request body is not JSON") from None
    except RecursionError:
        raise Refused(400, "Request body is nested too deeply") from None
    rids = cast("list[object]", rid) if isinstance(rid, list) else [rid]
    names = [others.get(each, each) for each in rids if isinstance(each, str)]
    if len(names) != len(rids):
        raise Refused(400, "rid must be a string, or a list of strings")
    written = json.dumps(names if isinstance(rid, list) else names[0])
    return (text[:start] + written + text[end:]).encode(coding, "surrogatepass")


def _rid(body: bytes) -> object:
    if not any(each in body for each in _ESCAPED):
        try:
            return _READER.decode(body).rid  # no other field is made into an object
        except (msgspec.DecodeError, RecursionError):
            pass  # Python's reader takes more
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        return _document(text).get("rid")
    except ValueError:
        return None
    except RecursionError:
        raise Refused(400, "Request body is nested too deeply") from None


def _document(text: str) -> dict[str, object]:
    """Numbers in it are how long they are written; empty where it is something else than an object.

    Raises ValueError: it is no JSON; RecursionError.
    """
    document: object = _PYTHON.decode(text)
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


def _place(text: str, name: str) -> tuple[int, int]:
    """Where in an object that can be read the value of its last key ``name`` begins and ends.

    Raises ValueError: there is none.
    """
    found: tuple[int, int] | None = None
    at = text.index("{")
    while text[at] != "}":  # at the brace or a comma, with a pair after it
        key, at = _PYTHON.raw_decode(text, _after(text, at + 1))
        start = _after(text, _after(text, at) + 1)  # the colon
        _, at = _PYTHON.raw_decode(text, start)
        if key == name:
            found = start, at
        at = _after(text, at)
    if found is None:
        raise ValueError(f"no key {name!r}")
    return found


def _after(text: str, at: int) -> int:
    """Of the next character that is no space."""
    while text[at] in _SPACE:
        at += 1
    return at
