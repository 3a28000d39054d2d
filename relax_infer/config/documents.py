"""YAML as recipes are written in it: values that JSON has, too, no key twice, and no larger than a
person would write."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import yaml

_MOST = 100_000
"""Values of a document once its aliases are followed."""
_DEEPEST = 64
"""Lists and mappings in each other."""
_BITS = 4096
"""Of a whole number: Python itself writes none with many more."""
_SHOWN = 60
"""Characters of a value that a message shows."""
_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, since nobody knows which of the two values is meant, and
    what a recipe loses on its way to a run, which is JSON. A date is the text that it looks like.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > _DEEPEST:
            raise yaml.YAMLError(f"more than {_DEEPEST} lists and mappings are in each other")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = cast("Any", super()).resolve(kind, value, implicit)
        return f"{_TAG}str" if tag == f"{_TAG}timestamp" else tag

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind not in _KINDS:
            raise _fault(node, f"a recipe has no values of kind {_short(kind)}")
        try:
            value: Any = cast("Any", super()).construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
            raise _fault(node, f"{_short(node.value)} is no {kind}") from None
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise _fault(node, f"{_short(node.value)} has too many digits")
        if isinstance(value, str) and not _is_text(value):
            raise _fault(node, f"{_short(value)} has half of a character")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        pairs = node.value if node.id == "mapping" else ()  # a tag may say so of anything
        for key, _ in pairs:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping",
                        node.start_mark,
                        f"found {key.value} twice",
                        key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """
    Raises:
        yaml.YAMLError: it is no YAML, has a key twice, is too large or too deep, or has a value
            that JSON has not.
    """
    loader: Any = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST:
            raise yaml.YAMLError(f"it stands for more than {_MOST} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def check_json(document: dict[str, Any]) -> dict[str, Any]:
    """The same, if it is the same after JSON, in which a recipe reaches its run.

    Raises:
        ValueError: it is not; with the place of the first such value.
    """
    if fault := _lost(document, ()):
        raise ValueError(fault)
    return document


def _lost(value: object, place: tuple[str, ...]) -> str:
    where = f"{'.'.join(place)} " if place else ""
    if len(place) > _DEEPEST:
        return f"more than {_DEEPEST} lists and mappings are in each other"
    if isinstance(value, Mapping):
        items = list(cast("Mapping[object, object]", value).items())
        for key, _ in items:
            if not isinstance(key, str) or not _is_text(key):
                return f"{where}has the key {_short(key)}, which is no text"
        below = [(str(key), item) for key, item in items]
    elif isinstance(value, (list, tuple)):
        below = [(str(n), item) for n, item in enumerate(cast("Sequence[object]", value))]
    elif value is None or isinstance(value, (bool, int, float, str)):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{where}is {value}, not a finite number"
        return "" if not isinstance(value, str) or _is_text(value) else f"{where}is no text"
    else:
        return f"{where}is a {type(value).__name__}, which JSON does not have"
    return next((said for k, item in below if (said := _lost(item, (*place, k)))), "")


def _is_text(value: str) -> bool:
    """Half of a surrogate pair, which a YAML escape can write, is no character."""
    return not any("\ud800" <= each <= "\udfff" for each in value)


def _fault(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for, each alias counted as what it names."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = _MOST + 1  # of one that contains itself
    below: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        below = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = list(node.value)
    known[id(node)] = 1 + sum(_size(each, known) for each in below)
    return known[id(node)]
