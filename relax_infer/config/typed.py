"""Numbers and switches of a recipe as they are written: a text or true is no count."""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

_POWER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def is_power(value: object) -> bool:
    """A number that YAML 1.1 reads as text, such as ``1e-4``."""
    return isinstance(value, str) and _POWER.fullmatch(value) is not None


def check_kind(value: object, field: FieldInfo) -> object:
    """The value of a recipe's field, which is otherwise not taken for what it is not: pydantic
    reads true as 1, "8" as 8 and "no" as false.

    Raises:
        ValidationError: with the place of each number or switch that is something else.
    """
    if any(isinstance(each, BeforeValidator) for each in field.metadata):
        return value  # it has a check of its own
    faults = [
        InitErrorDetails(type=kind, loc=place, input=given)
        for place, kind, given in _faults((), value, field.annotation)
    ]
    if faults:
        raise ValidationError.from_exception_data("recipe", faults)
    return value


_Kind = Literal["int_type", "float_type", "bool_type"]


def _faults(
    place: tuple[int | str, ...], value: object, annotation: Any
) -> Iterator[tuple[tuple[int | str, ...], _Kind, object]]:
    kinds = list(_members(annotation))
    for key, item, of in _inside(value, kinds):
        yield from _faults((*place, key), item, of)
    fault = _fault(value, kinds)
    if fault is not None:
        yield place, fault, value


def _inside(value: object, kinds: list[Any]) -> Iterator[tuple[int | str, object, Any]]:
    """Items of a list or a mapping, with their type."""
    for kind in kinds:
        inner = get_args(kind)
        if get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            items = cast("Sequence[object]", value)
            each = inner[:1] * len(items) if inner[-1] is Ellipsis else inner
            yield from zip(range(len(items)), items, each, strict=False)
        elif get_origin(kind) is dict and isinstance(value, Mapping):
            for key, item in cast("Mapping[object, object]", value).items():
                yield str(key), item, inner[1]


def _fault(value: object, kinds: list[Any]) -> _Kind | None:
    numbers = [kind for kind in kinds if kind in (int, float)]
    if not isinstance(value, (bool, int, float, str)) or type(value) in kinds or Any in kinds:
        return None
    if any(get_origin(kind) is Literal for kind in kinds):
        return None  # the type says what else is allowed
    if isinstance(value, bool) and numbers:
        return "int_type" if int in numbers else "float_type"
    if isinstance(value, str) and numbers and not (float in numbers and is_power(value)):
        return "int_type" if int in numbers else "float_type"
    return "bool_type" if bool in kinds and not numbers else None


def _members(annotation: Any) -> Iterator[Any]:
    """Types of a union, each without its marks."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _members(argument)
    else:
        yield annotation
