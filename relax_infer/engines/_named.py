"""Ids under which an engine on the other side of a connection will have a request.

Only they can be aborted there, and nobody sees its table: so a request without an id gets one, and
the ids of a batch are counted out as SGLang counts them.
"""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

_PROMPTS = ("text", "input_ids", "input_embeds", "prompt")
"""The first that is there holds; the last is that of ``/v1/completions``."""
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
    """The payload as it is, or with an id put at its end where it has none."""
    try:
        document = _read(body)
    except (ValueError, RecursionError):
        return Named(body)
    if not isinstance(document, dict):
        return Named(body)
    fields: dict[str, Any] = document
    stream = fields.get("stream") is True
    given = fields.get("rid")
    if given is None or given == "":
        given = f"guard-{uuid.uuid4().hex}"
        body = _with_id(body, given, empty=not fields)
    if isinstance(given, list):
        rids = tuple(each for each in given if isinstance(each, str) and each)
    elif not isinstance(given, str) or not given:
        rids = ()
    elif (count := _prompts(fields)) is not None:
        rids = tuple(f"{given}_{k}" for k in range(count))
    else:
        rids = (given,)
    return Named(body, rids, stream, _samples(fields) > 1)


def ids_in(part: bytes) -> list[str]:
    """Ids of requests that a part of a streamed answer tells."""
    return [each.decode(errors="replace") for each in _ID.findall(part)]


def _with_id(body: bytes, rid: str, *, empty: bool) -> bytes:
    """Of two equal keys the last holds, so this one does also where the payload says ``null``. All
    else stays as it is written, in whatever coding."""
    coding = json.detect_encoding(body)
    end = body.decode(coding, "surrogatepass").rstrip()
    end = f'{end[:-1]}{"" if empty else ", "}"rid": "{rid}"}}'
    return end.encode(coding, "surrogatepass")


def _read(body: bytes) -> Any:
    """With 0 for a whole number of so many digits that Python makes none of them; an engine's own
    reader may. Raises ValueError: it is no JSON; RecursionError."""
    try:
        return json.loads(body)
    except ValueError:
        return json.loads(body, parse_int=lambda digits: int(digits) if len(digits) < 99 else 0)


def _prompts(fields: dict[str, Any]) -> int | None:
    """Of a batch; None: it is one prompt, or none that SGLang would take."""
    given = (fields.get(name) for name in _PROMPTS)
    rows = next((value for value in given if value is not None), None)
    if not isinstance(rows, list) or not rows:
        return None
    depth, first = 0, rows
    while isinstance(first, list) and first:
        depth, first = depth + 1, first[0]
    single = 0 if isinstance(first, str) else 2 if isinstance(first, float) else 1
    return len(rows) if depth > single else None


def _samples(fields: dict[str, Any]) -> int:
    """Of each prompt. A batch may bring parameters for each of its prompts."""
    sampling = fields.get("sampling_params")
    rows: list[Any] = sampling if isinstance(sampling, list) else [sampling, fields]
    counts = [row.get("n") for row in rows if isinstance(row, dict)]
    return max((n for n in counts if isinstance(n, int)), default=1)
