"""A recipe with malformed fields as far as it can be told: with these at their defaults."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from relax_infer.config.placed import OWN_RULES
from relax_infer.config.recipe import RULES, Recipe
from relax_infer.contracts.faults import models_in

_NAMED = 3
"""Fields that are named one by one."""
_MATTERS_TO = {"steps": "train.schedule", "seed": None, "phase_attempts": None}
"""Fields that few rules but their own are about, and the fields of those rules."""


@dataclass(frozen=True)
class Mended:
    """A recipe that nobody wrote."""

    recipe: Recipe
    defaults: tuple[str, ...] = ()
    """Dotted fields that have their defaults in place of what was written."""
    unknown: tuple[str, ...] = ()
    """Fields that are not there, since no recipe has them."""
    ignored: tuple[str, ...] = ()
    """Overrides that could not be made."""

    def said_of(self, field: str) -> str:
        """What stands before a rule that this recipe breaks at ``field``; empty where none of what
        was mended has anything to do with it."""

        def matters(mended: str) -> bool:
            to = _MATTERS_TO.get(mended, "")
            return to is not None and field.startswith(to)

        defaults = [each for each in self.defaults if matters(each)]
        fields = len(defaults) + len(self.unknown) + len(self.ignored)
        if fields > _NAMED:
            return f"with the {fields} malformed fields left out"
        at = [f"with {each} at its default" for each in defaults]
        at += [f"without {each}" for each in self.unknown]
        return ", ".join((*at, *(f"with {each} not set" for each in self.ignored)))


def without_malformed(
    document: dict[str, Any], error: ValidationError, ignored: tuple[str, ...] = ()
) -> Mended | None:
    """The recipe with every malformed field at its default.

    Args:
        document: what was validated.
        error: every fault of it.
        ignored: overrides that are not in it.

    Returns:
        None where a malformed or missing field has no default: whatever were planned then would
        have little to do with what was meant. Fields of one section that contradict each other
        stay as they are.
    """
    mended = copy.deepcopy(document)
    defaults: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for fault in error.errors():
        if fault["type"] == "value_error" and isinstance(fault["input"], dict):
            continue  # a section's own rule: each of its fields can be read
        found = _place(mended, fault["loc"])
        if found is None:
            return None
        holder, parts = found
        known = fault["type"] != "extra_forbidden"
        (defaults if known else unknown)[".".join(parts)] = None
        holder.pop(parts[-1], None)
    try:
        recipe = Recipe.model_validate(mended, context={RULES: False, OWN_RULES: False})
    except ValidationError:
        return None
    return Mended(recipe, tuple(defaults), tuple(unknown), ignored)


def _place(recipe: Any, loc: Sequence[int | str]) -> tuple[dict[str, Any], list[str]] | None:
    """Section and dotted name of the field that a fault is in, if it may be left out."""
    here = recipe
    section: type[Any] | None = Recipe
    place: list[str] = []
    found: tuple[dict[str, Any], list[str]] | None = None
    for part in loc:
        if isinstance(part, int) and isinstance(here, (list, tuple)):
            items = cast("Sequence[Any]", here)
            if part >= len(items):
                break  # an item too few
            here = items[part]
            place.append(str(part))
            continue
        if section is None or not isinstance(part, str) or not isinstance(here, dict):
            break  # inside a value, or a member of a union
        holder = cast("dict[str, Any]", here)
        place.append(part)
        field = section.model_fields.get(part)
        if field is None:
            return holder, list(place)
        section = next(models_in(field.annotation), None)
        may = not field.is_required() and section is None
        found = (holder, list(place)) if may else None
        here = holder.get(part)
    return found
