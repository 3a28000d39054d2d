"""Secrets never reach a log: what looks like one, and what this process knows to be one.

Three nets, each for what the others miss: the name of a field, the shape of a text, and the very
values that the process was given.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

HIDDEN = "[hidden]"

_NAME = re.compile(
    r"(?:^|[_\-.])(?:token|secret|password|passwd|passphrase|credentials?|authorization|cookie"
    r"|api[_-]?key|private[_-]?key|access[_-]?key|encryption[_-]?key)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"fence[_-]?token", re.IGNORECASE)
"""A fence token orders grants; who knows one can do nothing with it over the network."""

_SHAPES = (
    # Authorization headers, in any notation.
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/\-]{4,}=*", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # user:password@host of a URL.
    (re.compile(r"(\b[a-z][a-z0-9+.\-]*://[^\s:/@]*):[^\s/@]+@", re.IGNORECASE), rf"\1:{HIDDEN}@"),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL),
        HIDDEN,
    ),
    # JSON web tokens, and the keys of hubs and services whose beginning gives them away.
    (re.compile(r"\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*"), HIDDEN),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_\-]{12,}"), HIDDEN),
    # name=value, --name value, "name": "value".
    (
        re.compile(
            r"((?:^|[\s\"'_\-?&;,{(])(?:token|secret|password|passwd|api[_\-]?key|access[_\-]?key)"
            r"[\"']?\s*(?:=|:)\s*[\"']?)(?!\[hidden\])[^\s\"'&;,})]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
)

_SHORTEST = 8
"""Characters of a value that is looked for in texts: a shorter one would hit innocent words."""

_values: set[str] = set()


def remember_secret(value: str) -> None:
    """Have ``value`` hidden wherever this process writes it from now on."""
    if len(value) >= _SHORTEST:
        _values.add(value)


def remember_environment(variables: Mapping[str, str] | None = None) -> None:
    """Have every variable hidden whose name says that it is a secret (TEMPORAL_API_KEY, ...)."""
    for name, value in (os.environ if variables is None else variables).items():
        if _NAME.search(name):
            remember_secret(value)


def redacted(value: Any, name: str = "") -> Any:
    """``value`` without secrets: a text, or whatever JSON knows; anything else as its text."""
    if name and _NAME.search(name) and not _NO_SECRET.search(name) and isinstance(value, str):
        return HIDDEN if value else value
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {key: redacted(each, str(key)) for key, each in pairs}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted(each) for each in cast("list[Any]", value)]
    return _text(str(value))


def hide_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The processor of structlog: every field of a line, those of exceptions too."""
    return {key: redacted(value, key) for key, value in event.items()}


def _text(text: str) -> str:
    for secret in _values:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text
