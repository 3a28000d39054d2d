"""Recipes from names, files or mappings; every error names file, field, value and the cure."""

import copy
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_origin

import yaml
from pydantic import ValidationError

from relax_infer.config.documents import read_yaml
from relax_infer.config.mended import Mended, without_malformed
from relax_infer.config.recipe import RULES, Recipe
from relax_infer.config.rules import broken_rules
from relax_infer.config.typed import is_power
from relax_infer.config.violation import Violation
from relax_infer.contracts.counted import counted
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.faults import faults_of, hint, models_in, takes_nothing


class RecipeError(PermanentError, ValueError):
    """A recipe that cannot be used; the text lists every fault with its field.

    Attributes:
        violations: the faults one by one; empty where there is no recipe to speak of.
        mended: the recipe without what is malformed in it, where that can be told.
    """

    def __init__(
        self,
        message: str,
        *,
        cure: str = "",
        violations: Sequence[Violation] = (),
        mended: Mended | None = None,
    ) -> None:
        super().__init__(message, cure=cure)
        self.violations, self.mended = tuple(violations), mended


_NAME_SHOWN = 200
"""Characters of a recipe's name in a message."""


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes in the package."""
    folder = resources.files("relax_infer.config") / "recipes"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_recipe(
    recipe: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None
) -> Recipe:
    """A validated recipe.

    Args:
        recipe: a shipped recipe's name, the path of a YAML file, or the recipe as a mapping.
        overrides: dotted keys and values put over it; a value of None removes a key that may be
            absent. The items of a list have numbers from 0:
            ``genrm.extra_models.0.engine.replicas``.

    Raises:
        RecipeError: names the file, each wrong field with its value, and what is allowed; or every
            rule between fields that it breaks.
    """
    return _load(recipe, overrides)


def read_recipe(
    recipe: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None
) -> Recipe:
    """A recipe that is well formed; its parts may not fit together. The planner tells of such
    rules together with its own.

    Raises:
        RecipeError: as for :func:`load_recipe`, without rules between fields.
    """
    return _load(recipe, overrides, rules=False)


def _load(
    recipe: str | Path | dict[str, Any], overrides: dict[str, Any] | None, *, rules: bool = True
) -> Recipe:
    document, origin = _read(recipe)
    document = copy.deepcopy(document)
    found: list[Violation] = []
    for key, value in (overrides or {}).items():
        fault = _removal_fault(key) if value is None else None
        fault = fault or _override(document, key, value)
        found += [fault] if fault else []
    ignored = tuple(each.field for each in found)
    try:
        read = Recipe.model_validate(document, context={RULES: False})
    except ValidationError as error:
        faults = faults_of(error, Recipe)
        found += [Violation(f.field or "recipe", f"{f.rule}.", f.cure) for f in faults]
        raise _malformed(origin, found, without_malformed(document, error, ignored)) from None
    if found:
        raise _malformed(origin, found, Mended(read, ignored=ignored))
    if rules and (broken := broken_rules(read)):
        raise RecipeError(f"{origin}: {'; '.join(str(each) for each in broken)}", violations=broken)
    return read


def _malformed(origin: str, found: Sequence[Violation], mended: Mended | None) -> RecipeError:
    text = f"{origin}: {'; '.join(str(each).removesuffix('.') for each in found)}"
    return RecipeError(text, violations=found, mended=mended)


def recipe_sha256(recipe: Recipe) -> str:
    """Identity of a resolved recipe."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """``["train.learning_rate=1e-4"]`` as a mapping; values are read as YAML."""
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise RecipeError(
                f"--set {assignment}: not of the form key=value",
                cure="Write for instance --set train.learning_rate=1.0e-4.",
            )
        try:
            overrides[key.strip()] = _number(read_yaml(text))
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {assignment}: the value is not YAML: {error}") from None
    return overrides


def _number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-4`` as text; a person means the number."""
    return float(value) if is_power(value) else value


def _read(recipe: str | Path | dict[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(recipe, dict):
        return recipe, "recipe"
    name = str(recipe)
    if name in shipped_recipes():
        text = (resources.files("relax_infer.config") / "recipes" / f"{name}.yaml").read_text()
        origin = f"recipe {name}"
    else:
        path = Path(name)
        if fault := _no_file(path):
            shown = name if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]}…"
            raise RecipeError(
                f"recipe {shown}: no shipped recipe and {fault}",
                cure=f"Shipped: {', '.join(shipped_recipes())}.",
            )
        text, origin = path.read_text(), name
    try:
        document = read_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: not YAML: {error}") from None
    if not isinstance(document, dict):
        raise RecipeError(f"{origin}: a recipe is a mapping, this is {type(document).__name__}")
    return cast("dict[str, Any]", document), origin


def _no_file(path: Path) -> str | None:
    """Why it is none."""
    try:
        if path.is_file():
            return None
        if path.exists():
            return "a folder, not a file" if path.is_dir() else "no regular file: write it into one"
        return "no file of that name"
    except OSError as error:
        return f"no file of that name ({error.strerror})"


def _removal_fault(key: str) -> Violation | None:
    """Why a recipe cannot be without it: there is no such key, or every recipe has it, with its
    default if need be."""
    here: Any = Recipe
    parts = key.split(".")
    for number, part in enumerate(parts):
        if part.isdecimal():
            continue
        field = here.model_fields.get(part)
        if field is None:
            wrong = parts[: number + 1]
            return Violation(".".join(wrong), "no such field, got null.", f"{hint(wrong, Recipe)}.")
        below = next(models_in(field.annotation), None)
        if number == len(parts) - 1:
            if takes_nothing(field.annotation) or get_origin(field.annotation) in (tuple, dict):
                return None  # a list or a mapping is empty then
            if below is None:
                cure = "Leave it out to have the recipe's value."
            else:
                inside = next(iter(below.model_fields), "")
                cure = (
                    f"Every recipe has this section: set its fields, for instance {key}.{inside},"
                    " or leave it out to have its defaults."
                )
            return Violation(key, "may not be null.", cure)
        if below is None:
            return None  # a key of a mapping that the recipe does not know inside
        here = below
    return None


def _override(document: dict[str, Any], key: str, value: Any) -> Violation | None:
    """Put it there; or why it cannot be."""
    *parents, last = key.split(".")
    here: dict[str, Any] | list[Any] = document
    for number, parent in enumerate(parents, 1):
        below = _below(here, parent)
        if below is None and isinstance(here, dict):
            below = here[parent] = {}
        if not isinstance(below, (dict, list)):
            above = ".".join(parents[:number])
            rule = f"cannot be set: {above} is {below!r}, not a section of the recipe."
            return Violation(key, rule, f"Set {above} as a whole, or leave this out.")
        here = cast("dict[str, Any] | list[Any]", below)
    if isinstance(here, list):
        if _below(here, last) is None:
            rule = f"cannot be set: the list has {counted(len(here), 'item')}."
            return Violation(key, rule, "Items have numbers from 0; set the whole list to add one.")
        here[int(last)] = value
    elif value is None:
        here.pop(last, None)
    else:
        here[last] = value
    return None


def _below(here: dict[str, Any] | list[Any], key: str) -> Any:
    """A mapping's value, or a list's item under its number from 0; None where there is none."""
    if isinstance(here, dict):
        return here.get(key)
    return here[int(key)] if key.isdecimal() and int(key) < len(here) else None
