"""The values that a run was started with, as the store keeps them."""

import json
from collections.abc import Iterator, Mapping
from html import escape


def recipe_table(recipe: Mapping[str, object]) -> str:
    """A foldable table per section; what belongs to none comes first."""
    if not recipe:
        return '<p class="quiet">The store does not keep the recipe of this run.</p>'
    alone = {key: value for key, value in recipe.items() if not _is_section(value)}
    sections = {key: value for key, value in recipe.items() if _is_section(value)}
    tables = [_table(alone)] if alone else []
    tables += [
        f"<details><summary>{escape(name)}</summary>{_table({name: value})}</details>"
        for name, value in sections.items()
    ]
    return "".join(tables)


def _is_section(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _table(values: Mapping[str, object]) -> str:
    rows = "".join(
        f'<tr><td>{escape(key)}</td><td class="left wrap"><code>{escape(told)}</code></td></tr>'
        for key, told in _flat(values)
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys, as ``--set`` takes them, and their values as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)
