"""Validated primitives of the schema: text, integer, address, frozen map, strict keys.

Every failure is a ``ValueError``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict

from relax_infer.contracts.base import MOST_COUNT

V = TypeVar("V")


class FrozenMap(Mapping[str, V], Generic[V]):
    """A mapping with text keys that cannot be changed; copies what it is given; pickles."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        self._entries: dict[str, V] = dict(sorted((entries or {}).items()))

    def __getitem__(self, key: str) -> V:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._entries!r})"


def text(value: object) -> str:
    """Text: not empty, no white space at either end."""
    if not isinstance(value, str):
        raise ValueError(f"must be text, got {type(value).__name__}")
    if not value or value != value.strip():
        raise ValueError(f"must not be empty or begin or end with white space, got {value!r}")
    return value


def url(value: str) -> str:
    """An http(s) address without credentials, query or fragment; trailing ``/`` removed."""
    text(value)
    if " " in value or not value.isprintable():  # every other white space is not printable
        raise ValueError(f"URL has white space or control characters: {value!r}")
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"URL must be http or https: {value!r}")
    if not parts.hostname:
        raise ValueError(f"URL names no host: {value!r}")
    if "@" in parts.netloc:
        raise ValueError("URL must not carry a user or password")
    if "?" in value or "#" in value:
        raise ValueError(f"URL must not have a query or fragment: {value!r}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"URL port must be absent or between 1 and 65535: {value!r}")
    return value.rstrip("/")


def text_map(value: object) -> FrozenMap[str]:
    """A copied, frozen ``str -> str`` map, both sides validated as text."""
    return FrozenMap({text(k): text(v) for k, v in mapping(value, "map").items()})


def unique_texts(value: object) -> tuple[str, ...]:
    """Sorted, each once."""
    return tuple(sorted({text(v) for v in sequence(value, "list of text")}))


def mapping(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be an object, got {type(value).__name__}")
    return cast("Mapping[Any, Any]", value)


def sequence(value: object, what: str) -> Iterable[Any]:
    """Anything that lists items; text and maps do not."""
    given = type(value).__name__
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise ValueError(f"{what} must be a list, got {given}")
    return cast("Iterable[Any]", value)


def json_list(value: object, parse: Callable[[object], V], what: str) -> list[V]:
    """Each item of a JSON list, parsed."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list, got {type(value).__name__}")
    return [parse(item) for item in cast("list[object]", value)]


def keyed(
    document: object, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The document's own copy, once its keys are exactly those of the schema."""
    fields = mapping(document, what)
    unknown = sorted(str(k) for k in fields if k not in required and k not in optional)
    if unknown:
        raise ValueError(f"Unknown {what} fields: {', '.join(unknown)}")
    missing = [k for k in required if k not in fields]
    if missing:
        raise ValueError(f"Missing {what} fields: {', '.join(missing)}")
    return dict(fields)


Text = Annotated[str, Strict(), AfterValidator(text)]
Url = Annotated[str, Strict(), AfterValidator(url)]
Integer = Annotated[int, Strict(), Field(ge=0, le=MOST_COUNT)]
