"""From a judge's words to a number, by the rule of the recipe; anything doubtful is no number.

Pure.
"""

import json
import math
import re
from typing import Any

from relax_infer.config.scoring import Verdict
from relax_infer.samples.tasks import UnparsableVerdict

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)
_SHOWN = 200
"""Characters of an odd answer that its reason quotes."""


def read_verdict(text: str, verdict: Verdict, key: str) -> float:
    """The number, or label, that ``key`` names in the answer.

    With a pattern: what its named group matched; the pattern must match once and only once.
    Without: the answer is one JSON object, bare or in a fence, without a key twice.

    Raises:
        UnparsableVerdict: it is empty, ambiguous, of another form, no number and no known label,
            not finite, or outside ``verdict.lowest`` … ``verdict.highest``.
    """
    if not text.strip():
        raise UnparsableVerdict("the judge said nothing")
    values = _document(text) if verdict.pattern is None else _match(text, verdict.pattern)
    if key not in values or values[key] is None:
        raise UnparsableVerdict(f"{_shown(text)} has no {key}")
    number = _number(values[key], verdict, text)
    if not math.isfinite(number) or not verdict.lowest <= number <= verdict.highest:
        raise UnparsableVerdict(
            f"{number} in {_shown(text)} is not from {verdict.lowest:g} to {verdict.highest:g}"
        )
    return number


def _match(text: str, pattern: str) -> dict[str, Any]:
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise UnparsableVerdict(f"{_shown(text)} has {len(found)} matches of the pattern, not one")
    return found[0].groupdict()


def _document(text: str) -> dict[str, Any]:
    fenced = _FENCE.findall(text)
    if len(fenced) > 1:
        raise UnparsableVerdict(f"{_shown(text)} has {len(fenced)} fenced parts, not one")
    try:
        document = json.loads(
            fenced[0] if fenced else text, object_pairs_hook=_once, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise UnparsableVerdict(f"{_shown(text)} is not JSON: {str(error)[:_SHOWN]}") from None
    if not isinstance(document, dict):
        raise UnparsableVerdict(f"{_shown(text)} is no JSON object")
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key comes twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _number(value: Any, verdict: Verdict, text: str) -> float:
    if isinstance(value, str):
        label = value.strip()
        if label in verdict.labels:
            return verdict.labels[label]
        if verdict.pattern is not None and _NUMBER.fullmatch(label):
            return float(label)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    known = f" and no label of {', '.join(verdict.labels)}" if verdict.labels else ""
    raise UnparsableVerdict(f"{str(value)[:_SHOWN]!r} in {_shown(text)} is no number{known}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
