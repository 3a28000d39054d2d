"""The recipe, field by field, for the documentation.

``python -m relax_infer.config.reference docs/recipe.md`` writes the page; a test fails when the
page and the models differ.
"""

import re
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from relax_infer.config.placed import Section
from relax_infer.config.recipe import Recipe

_HEAD = """# Recipe

Made from the models in `relax_infer/config` by `make reference`; do not edit.
A recipe is YAML. Unknown fields are refused; every error names file, field and value, and a recipe
whose parts do not fit together is told every rule that it breaks.
`--set section.field=value` overrides one field, `--set section=null` removes a section that may be
absent, or empties a list or a mapping; `relax-infer config schema` is the same for editors
([command line](cli.md#recipes)).
`[]` is an item of a list; `--set` names it by its number from 0.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections("", Recipe, {})])


def _sections(prefix: str, section: type[Section], told: dict[type[Section], str]) -> list[str]:
    """The section's table and those below it; ``told`` has where each kind was explained."""
    told[section] = prefix.rstrip(".")
    title = prefix.rstrip(".") or "Top level"
    about = (section.__doc__ or "").strip()
    rows = [f"## {title}\n", about, "", "| field | type | default | |", "| --- | --- | --- | --- |"]
    below: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        text = _text(field)
        if inner is None:
            rows.append(f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {text} |")
            continue
        where = f"{prefix}{name}[]" if _is_list(field.annotation) else f"{prefix}{name}"
        kind = "list of sections" if _is_list(field.annotation) else "section"
        optional = "" if field.is_required() else " (optional)"
        if inner in told:
            as_there = f"Fields as in [`{told[inner]}`](#{anchor(told[inner])}). {text}".strip()
            rows.append(f"| `{where}` | {kind}{optional} | | {as_there} |")
        else:
            rows.append(
                f"| [`{where}`](#{anchor(where)}) | {kind}{optional} | | {text} |".replace(
                    "  ", " "
                )
            )
            below += _sections(f"{where}.", inner, told)
    return [*rows, "", *below]


def anchor(title: str) -> str:
    """Where a heading is found: of its name letters, digits and underscores are left."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _is_list(annotation: Any) -> bool:
    return any(get_origin(a) is tuple for a in (annotation, *get_args(annotation)))


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = (_section_of(argument) for argument in get_args(annotation))
    return next((section for section in inner if section is not None), None)


def _type(field: FieldInfo) -> str:
    text = _name(field.annotation)
    bounds = [bound for m in field.metadata if (bound := _bound(m))]
    return f"{text}, {' '.join(bounds)}" if bounds else text


def _name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        constraints = [c for mark in marks for c in getattr(mark, "metadata", [mark])]
        return ", ".join([_name(inner), *(b for c in constraints if (b := _bound(c)))])
    if origin in (Union, UnionType):
        return " or ".join("empty" if a is type(None) else _name(a) for a in get_args(annotation))
    if origin is not None and str(origin).endswith("Literal"):
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin is not None:
        return str(origin.__name__)
    return str(getattr(annotation, "__name__", annotation))


def _bound(constraint: Any) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (value := getattr(constraint, attribute, None)) is not None:
            return f"{sign} {value}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "empty" if value is None or value == {} else f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
