"""What is wrong with a document, in words: field, value, what is allowed, what was meant."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

_SHOWN = 60
"""Characters of a value that a message shows."""
_MEANT = 0.7
"""Likeness of two names that may be one and its misspelling."""
_LISTED = 12
"""Fields that are named where none is like the wrong one."""
_UNION = "union"
_ALLOWED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_type": "a text",
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "dataclass_type"),
        "a mapping of fields to values",
    ),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
}
"""In words, what a fault of that type asks for."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    field: str
    """Dotted; empty: the document itself."""
    rule: str
    """What is allowed there, and what was given."""
    meant: str = ""
    """What may have been meant instead, or what there is."""
    cure: str = "Change it."
    """A sentence."""

    def __str__(self) -> str:
        said = f"{self.field}: {self.rule}" if self.field else self.rule
        return f"{said}; {self.meant}" if self.meant else said


def explain(error: ValidationError, model: Any = None) -> str:
    """Every fault, with its field; arguments as of :func:`faults_of`."""
    return "; ".join(str(fault) for fault in faults_of(error, model))


def faults_of(error: ValidationError, model: Any = None) -> list[Fault]:
    """Every fault, each once.

    Args:
        error: of validating one document.
        model: what the document should have been; with it, a name that is wrong is told from the
            one that was meant.
    """
    return list(dict.fromkeys(_fault(fault, model) for fault in _merged(error)))


def _merged(error: ValidationError) -> Iterator[dict[str, Any]]:
    """A value that is no member of a union has a fault for each member: they are one."""
    members: dict[tuple[tuple[int | str, ...], int], list[dict[str, Any]]] = {}
    for number, each in enumerate(error.errors()):
        fault: dict[str, Any] = dict(each)
        place: tuple[int | str, ...] = fault["loc"]
        is_member = place and _is_tag(place[-1])
        key = (place[:-1], id(fault["input"])) if is_member else (place, -1 - number)
        members.setdefault(key, []).append(fault)
    for (place, _), faults in members.items():
        kinds = [str(fault["type"]) for fault in faults]
        if len(faults) == 1 or not all(kind in _ALLOWED for kind in kinds):
            yield from faults
            continue
        words = dict.fromkeys(_ALLOWED[kind] for kind in kinds)
        if _ALLOWED["float_type"] in words:
            words.pop(_ALLOWED["int_type"], None)
        *others, last = words
        allowed = f"{', '.join(others)}, or {last}" if others else last
        yield faults[0] | {"loc": place, "type": _UNION, "msg": f"must be {allowed}"}


def _is_tag(part: int | str) -> bool:
    """Whether it names a member of a union, which is in no document."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool") or re.fullmatch(r"[\w-]+", part) is None
    )


def hint(name: Sequence[str], model: Any) -> str:
    """What was meant by a dotted name that ``model`` does not have, or what there is instead."""
    *parents, last = name
    section = _at(parents, model)
    names = list(section.model_fields) if section is not None else []
    prefix = "".join(f"{part}." for part in parents)
    if near := difflib.get_close_matches(last, names, 1, _MEANT):
        return f"did you mean {prefix}{near[0]}?"
    below = list(dotted(model))
    for meant in (_same_end, _initials):
        found = [each for each in below if meant(last, each.rpartition(".")[2])]
        found.sort(key=lambda each: (not each.startswith(prefix), each.count(".")))
        if found:
            return f"did you mean {found[0]}?"
    where = ".".join(parents) or "it"
    more = ", …" if len(names) > _LISTED else ""
    return f"{where} has {', '.join(names[:_LISTED])}{more}" if names else ""


def dotted(model: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a model and of the models in it."""
    for name, field in model.model_fields.items() if _is_model(model) else ():
        yield f"{prefix}{name}"
        for inner in models_in(field.annotation):
            listed = "0." if _is_list(field.annotation) else ""
            yield from dotted(inner, f"{prefix}{name}.{listed}")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that a field of that type may hold, itself or as items."""
    if _is_model(annotation):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from models_in(argument)


def takes_nothing(annotation: Any) -> bool:
    """Whether null is a value of that type."""
    if annotation in (None, type(None), Any):
        return True
    if get_origin(annotation) in (Union, UnionType):
        return any(takes_nothing(argument) for argument in get_args(annotation))
    return False


def _fault(fault: dict[str, Any], model: Any) -> Fault:
    # Members of a union are in the place too: only what the document itself names is shown.
    place = [str(part) for part in fault["loc"] if re.fullmatch(r"[\w-]+", str(part))]
    where = ".".join(place)
    given = fault.get("input")
    shown = f", got {_shown(given)}"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("String should have", "must have")
    match fault["type"]:
        case "extra_forbidden" if not place or place[-1] != fault["loc"][-1]:
            rule = f"no such field {str(fault['loc'][-1])!r}{shown}"
            return Fault(where or "the input", rule, cure="Remove it.")
        case "extra_forbidden":
            meant = hint(place, model) if _is_model(model) else ""
            cure = f"D{meant[1:]}" if meant[-1:] == "?" else f"Remove it: {meant}."
            return Fault(where, f"no such field{shown}", meant, cure if meant else "Remove it.")
        case "missing":
            return Fault(where or "the input", "is missing", cure="Add it.")
        case "greater_than_equal" if fault.get("ctx") == {"ge": 1}:
            message = "must be a positive whole number"
        case kind if kind in _ALLOWED:
            message = f"must be {_ALLOWED[kind]}"
        case "literal_error":
            allowed = str(fault["ctx"]["expected"]).replace(" or ", ", ").replace("'", "")
            message = f"must be one of {allowed}"
        case "json_invalid":
            return Fault(where or "the input", f"is not JSON ({fault['ctx']['error']})")
        case "value_error":
            shown = f", got {_shown(given)}" if isinstance(given, (str, int, float)) else ""
        case _:
            pass
    return Fault(where, f"{message}{shown}", cure=_change(place, model))


def _change(place: Sequence[str], model: Any) -> str:
    section = _at(place[:-1], model) if place else None
    field = section.model_fields.get(place[-1]) if section is not None else None
    if field is None or field.is_required():
        return "Change it."
    default = field.get_default(call_default_factory=True)
    if isinstance(default, (bool, int, float)) or (isinstance(default, str) and default):
        return f"Change it, or leave it out to have its default, {_plain(default)}."
    return "Change it, or leave it out."


def _plain(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _at(path: Sequence[str], model: Any) -> type[BaseModel] | None:
    """The section at a place."""
    here = model if _is_model(model) else None
    for part in path:
        if here is None:
            return None
        if part.isdecimal():
            continue
        field = here.model_fields.get(part)
        here = next(models_in(field.annotation), None) if field is not None else None
    return here


def _same_end(wrong: str, known: str) -> bool:
    return wrong == known


def _initials(wrong: str, known: str) -> bool:
    """``lr`` is learning_rate."""
    words = known.split("_")
    return len(words) > 1 and wrong == "".join(word[:1] for word in words)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(cast("type[object]", kind), BaseModel)


def _is_list(annotation: Any) -> bool:
    return any(get_origin(a) in (tuple, list) for a in (annotation, *get_args(annotation)))
