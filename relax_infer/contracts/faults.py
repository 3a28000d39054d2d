"""What is wrong with a document, in words: field, value, what is allowed, what was meant."""

import difflib
import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

_SHOWN = 60
"""Characters of a value that a message shows."""
_MEANT = 0.7
"""Likeness of two names that may be one and its misspelling."""
_LISTED = 12
"""Fields that are named where none is like the wrong one."""


def explain(error: ValidationError, model: Any = None) -> str:
    """Every fault, with its field.

    Args:
        error: of validating one document.
        model: what the document should have been; with it, a name that is wrong is told from the
            one that was meant.
    """
    return "; ".join(dict.fromkeys(_fault(dict(fault), model) for fault in error.errors()))


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


def _fault(fault: dict[str, Any], model: Any) -> str:
    # Members of a union are in the place too: only what the document itself names is shown.
    place = [str(part) for part in fault["loc"] if re.fullmatch(r"[\w-]+", str(part))]
    where = ".".join(place)
    given = fault.get("input")
    shown = f", got {_shown(given)}"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    match fault["type"]:
        case "extra_forbidden" if not place or place[-1] != fault["loc"][-1]:
            return f"{where or 'the input'}: no such field {str(fault['loc'][-1])!r}{shown}"
        case "extra_forbidden":
            meant = hint(place, model) if _is_model(model) else ""
            return f"{where}: no such field{shown}" + (f"; {meant}" if meant else "")
        case "missing":
            return f"{where or 'the input'}: is missing"
        case "greater_than_equal" if fault.get("ctx") == {"ge": 1}:
            message = "must be a positive whole number"
        case "int_parsing" | "int_type" | "int_from_float":
            message = "must be a whole number"
        case "float_parsing" | "float_type":
            message = "must be a number"
        case "bool_parsing" | "bool_type":
            message = "must be true or false"
        case "string_type":
            message = "must be a text"
        case "dict_type" | "model_type" | "model_attributes_type" | "dataclass_type":
            message = "must be a mapping of fields to values"
        case "tuple_type" | "list_type":
            message = "must be a list"
        case "literal_error":
            allowed = str(fault["ctx"]["expected"]).replace(" or ", ", ").replace("'", "")
            message = f"must be one of {allowed}"
        case "json_invalid":
            return f"{where or 'the input'}: is not JSON ({fault['ctx']['error']})"
        case "value_error":
            shown = f", got {_shown(given)}" if isinstance(given, (str, int, float)) else ""
        case _:
            pass
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"


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
