"""The recipe, field by field, for the documentation.

``python -m relax_infer.config.reference docs/recipe.md`` writes the page; a test fails when the
page and the models differ.
"""

import sys
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from relax_infer.config.recipe import Recipe, Section

_HEAD = """# Recipe

Made from `relax_infer/config/recipe.py` by `make reference`; do not edit.
A recipe is YAML. Unknown fields are refused; every error names file, field and value.
`--set section.field=value` overrides one field, `--set section=null` removes a section.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections("", Recipe)])


def _sections(prefix: str, section: type[Section]) -> list[str]:
    title = prefix.rstrip(".") or "Top level"
    about = (section.__doc__ or "").strip()
    rows = [f"## {title}\n", about, "", "| field | type | default | |", "| --- | --- | --- | --- |"]
    below: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is None:
            rows.append(
                f"| `{prefix}{name}` | {_type(field)} | {_default(field)} |"
                f" {field.description or ''} |"
            )
        else:
            optional = "" if field.is_required() else " (optional)"
            rows.append(f"| [`{prefix}{name}`](#{prefix}{name}) | section{optional} | | |")
            below += _sections(f"{prefix}{name}.", inner)
    return [*rows, "", *below]


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _type(field: FieldInfo) -> str:
    text = _name(field.annotation)
    bounds = [str(m) for m in field.metadata]
    return text if not bounds else f"{text}, {' '.join(_bound(m) for m in field.metadata)}".strip()


def _name(annotation: Any) -> str:
    origin = get_origin(annotation)
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
