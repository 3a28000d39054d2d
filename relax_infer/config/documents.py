"""YAML as recipes are written in it: no key twice, and not larger than a person would write."""

from typing import Any

import yaml

_MOST = 100_000
"""Values of a document once its aliases are followed."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: nobody knows which of the two values is meant."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
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
        yaml.YAMLError: it is no YAML, has a key twice, or is too large.
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
