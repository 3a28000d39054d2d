"""The pairs of a JSON object by where they stand, without a value being made of any.

Takes what Python's reader takes, and more: what is no JSON within a value only the engine says. A
payload of 64 MiB can be tens of millions of objects, or a gigabyte and more; here it stays text.
"""

import json
import re
from collections.abc import Iterator
from typing import cast

from relax_infer.engines._asgi import Refused

MOST_KEYS = 10_000
"""Of a payload; as at a gateway."""
MOST_MARKS = 1_000_000
"""Ends of lists and objects of a payload that are looked at; a second and a half."""
DEEPEST = 900
"""Lists and objects in one another; Python's reader, which the engine's is, ends not far beyond."""

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_FLAT = r'[^\[\]{}"]*+'
_LEAF = rf"[\[{{]{_FLAT}(?:{_STRING}{_FLAT})*+[\]}}]"
_SPACE = re.compile(r"[ \t\n\r]*+")
_KEY = re.compile(_STRING, re.DOTALL)
_SCALAR = re.compile(r'[^\[\]{}",: \t\n\r]++')
_RUN = re.compile(rf'(?:[^\[\]{{}}"]++|{_STRING}|{_LEAF})*+', re.DOTALL)
"""Up to the next end of a list or object that has others inside."""


def pairs(text: str) -> Iterator[tuple[str, int, int]]:
    """Key of each pair in its order, and where its value begins and ends.

    Raises:
        ValueError: the text is no JSON object.
        Refused: 400, it has more of something, or more deeply, than is looked at.
    """
    marks = _Marks()
    at = after_space(text, 0)
    _expect(text, at, "{")
    at = after_space(text, at + 1)
    count = 0
    while text[at : at + 1] != "}":
        if count:
            _expect(text, at, ",")
            at = after_space(text, at + 1)
        count += 1
        if count > MOST_KEYS:
            raise Refused(400, f"Request body has more than {MOST_KEYS} keys")
        end = _match(_KEY, text, at)
        key = cast("str", json.loads(text[at:end], strict=False))
        at = after_space(text, end)
        _expect(text, at, ":")
        start = after_space(text, at + 1)
        end = marks.end_of(text, start)
        yield key, start, end
        at = after_space(text, end)
    if after_space(text, at + 1) < len(text):
        raise ValueError("something follows the object")


def length_of(text: str) -> int:
    """Elements of a list. Raises as :func:`pairs`."""
    marks = _Marks()
    at, count = after_space(text, 1), 0
    while text[at : at + 1] != "]":
        if count:
            _expect(text, at, ",")
            at = after_space(text, at + 1)
        at = after_space(text, marks.end_of(text, at))
        marks.count()
        count += 1
    return count


def after_space(text: str, at: int) -> int:
    """Of the next character that is no space."""
    return cast("re.Match[str]", _SPACE.match(text, at)).end()


class _Marks:
    def __init__(self) -> None:
        self._seen = 0

    def count(self) -> None:
        self._seen += 1
        if self._seen > MOST_MARKS:
            raise Refused(400, f"Request body has more than {MOST_MARKS} lists and objects")

    def end_of(self, text: str, at: int) -> int:
        """Of the value that begins there."""
        first = text[at : at + 1]
        if first == '"':
            return _match(_KEY, text, at)
        if first not in ("[", "{"):
            return _match(_SCALAR, text, at)
        depth = 1
        at += 1
        while depth:
            at = cast("re.Match[str]", _RUN.match(text, at)).end()
            self.count()
            if at == len(text) or text[at] == '"':
                raise ValueError("it does not end")
            depth += 1 if text[at] in "[{" else -1
            if depth > DEEPEST:
                raise Refused(400, "Request body is nested too deeply")
            at += 1
        return at


def _match(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Raises ValueError."""
    found = pattern.match(text, at)
    if found is None:
        raise ValueError(f"no value at {at}")
    return found.end()


def _expect(text: str, at: int, character: str) -> None:
    """Raises ValueError."""
    if text[at : at + 1] != character:
        raise ValueError(f"no {character} at {at}")
