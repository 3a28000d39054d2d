"""Ids under which an engine on the other side of a connection will have a request.

Only they can be aborted there, and nobody sees its table: so a request without an id gets one, and
the ids of a batch are counted out as SGLang counts them.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from relax_infer.engines._pairs import length_of, pairs
from relax_infer.engines._rids import value_of

_PROMPTS = ("text", "input_ids", "input_embeds", "prompt")
"""The first that is there holds; the last is that of ``/v1/completions``."""
_FIELDS = (*_PROMPTS, "rid", "stream", "sampling_params", "n")
_READER = msgspec.json.Decoder(
    msgspec.defstruct("_Payload", [(name, msgspec.Raw, msgspec.Raw(b"")) for name in _FIELDS])
)
_LISTS = re.compile(r"(?:\[[ \t\n\r]*+)*+")
_FLOAT = re.compile(r"-?\d++[.eE]|NaN|-?Infinity")
_COUNT = re.compile(r'"n"\s*+:\s*+(\d{1,9})')
_LARGE = 1 << 20
_ID = re.compile(rb'"id":\s*"([^"\\]+)"')


@dataclass(frozen=True)
class Named:
    """A payload of ``/generate`` or of an OpenAI route, as it is sent on."""

    body: bytes
    rids: tuple[str, ...] = ()
    """Of its prompts, in order; none where it is no JSON object, which the engine says better."""
    stream: bool = False
    samples: bool = False
    """SGLang makes a new id for each, and tells it in the answer only."""


def named(body: bytes) -> Named:
    """The payload as it is, or with an id put at its end where it has none. Of its prompts nothing
    is made but their number.

    Raises:
        Refused: 400, it has too much of something to be looked through.
    """
    try:
        fields = _fields(body)
        given = value_of(fields.get("rid", "null"))
        count = _prompts(fields)
        samples = _samples(fields) > 1
    except ValueError:
        return Named(body)
    stream = fields.get("stream") == "true"
    if given is None or given == "":
        given = f"guard-{uuid.uuid4().hex}"
        body = _with_id(body, given)
    if isinstance(given, list):
        each_given = cast("list[object]", given)
        rids = tuple(each for each in each_given if isinstance(each, str) and each)
    elif not isinstance(given, str) or not given:
        rids = ()
    elif count is not None:
        rids = tuple(f"{given}_{k}" for k in range(count))
    else:
        rids = (given,)
    return Named(body, rids, stream, samples)


def ids_in(part: bytes) -> list[str]:
    """Ids of requests that a part of a streamed answer tells."""
    return [each.decode(errors="replace") for each in _ID.findall(part)]


def _fields(body: bytes) -> dict[str, str]:
    """The values that say how many requests it is, as they are written. Raises ValueError: it is no
    JSON object; Refused."""
    try:
        read = _READER.decode(body)
    except (msgspec.DecodeError, RecursionError):  # Python's reader takes more
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        return {key: text[start:end] for key, start, end in pairs(text) if key in _FIELDS}
    values = ((name, bytes(getattr(read, name))) for name in _FIELDS)
    return {name: value.decode(errors="surrogatepass") for name, value in values if value}


def _with_id(body: bytes, rid: str) -> bytes:
    """Of two equal keys the last holds, so this one does also where the payload says ``null``. All
    else stays as it is written, in whatever coding."""
    coding = json.detect_encoding(body)
    before = body.decode(coding, "surrogatepass").rstrip()[:-1]
    comma = "" if before.rstrip().endswith("{") else ", "
    return f'{before}{comma}"rid": "{rid}"}}'.encode(coding, "surrogatepass")


def _prompts(fields: Mapping[str, str]) -> int | None:
    """Of a batch; None: it is one prompt, or none that SGLang would take."""
    given = (fields.get(name, "null") for name in _PROMPTS)
    rows = next((value for value in given if value != "null"), "")
    lists = cast("re.Match[str]", _LISTS.match(rows))
    depth, first = lists[0].count("["), rows[lists.end() : lists.end() + 1]
    if first == "]":  # the innermost is empty
        depth -= 1
    if depth < 1:
        return None
    single = 0 if first == '"' else 2 if _FLOAT.match(rows, lists.end()) else 1
    return length_of(rows) if depth > single else None


def _samples(fields: Mapping[str, str]) -> int:
    """Of each prompt. A batch may bring parameters for each of its prompts. Raises ValueError."""
    sampling = fields.get("sampling_params", "null")
    counts: list[Any] = [int(n) for n in _COUNT.findall(f'"n": {fields.get("n", 1)}')]
    if len(sampling) > _LARGE:  # an object for each of so many prompts is not made
        counts += [int(n) for n in _COUNT.findall(sampling)]
    else:
        read = json.loads(sampling, parse_int=lambda digits: int(digits[:9]))
        rows: list[Any] = read if isinstance(read, list) else [read]
        counts += [row.get("n") for row in rows if isinstance(row, dict)]
    return max((n for n in counts if isinstance(n, int)), default=1)
