"""From what a person typed to the start of a run, checked before anything starts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_infer.cli._errors import CommandError
from relax_infer.config import (
    Recipe,
    RecipeError,
    load_recipe,
    parse_overrides,
    read_recipe,
    shipped_recipes,
)
from relax_infer.config.documents import read_yaml
from relax_infer.config.placed import Scalar
from relax_infer.contracts.refs import RUN_ID
from relax_infer.contracts.run import RunInput
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    Violation,
    plan_inference_placement,
)
from relax_infer.placement.cures import agreed, as_options
from relax_infer.placement.malformed import every_violation
from relax_infer.placement.named_files import named_data

Loader = Callable[[str, dict[str, Any]], Recipe]
_MODELS = ("rollout", "genrm", "teacher")


@dataclass(frozen=True)
class Checked:
    """A recipe that can be placed, and the input that starts it anywhere."""

    recipe: Recipe
    plan: InferencePlacementPlan
    start: RunInput


class CannotBePlacedError(CommandError):
    """A recipe without a plan."""

    def __init__(
        self, subject: str, recipe: Recipe | None, violations: tuple[Violation, ...]
    ) -> None:
        self.recipe = recipe
        """None where it is not well formed."""
        self.violations = violations
        self.cured_by = {} if recipe is None else _cured_by(recipe, violations)
        """Settings that cure all of them together; empty where a person has to choose."""
        reasons = "".join(f"\n  {violation}" for violation in violations)
        if self.cured_by:
            reasons += f"\nWith {as_options(self.cured_by)} it can be used."
        super().__init__(f"{subject}:{reasons}")


def check(recipe: str, assignments: list[str], steps: int | None = None) -> Checked:
    """Read, override, validate and place.

    Raises:
        RecipeError: there is no such recipe, or it cannot be read or overridden.
        CannotBePlacedError: every wrong field, and every rule that it breaks.
    """
    overrides = parse_overrides(assignments)
    try:
        read = load(recipe, overrides, read_recipe)
    except RecipeError as error:
        if not error.violations:
            raise
        subject = f"{recipe} is not well formed"
        raise CannotBePlacedError(subject, None, every_violation(error)) from error
    overrides |= {
        key: str(Path(model).resolve()) for key, model in _paths(read) if _is_relative(model)
    }
    ready = load(recipe, overrides, read_recipe)
    if steps is not None:
        ready = ready.model_copy(update={"steps": steps})
    try:
        plan = plan_inference_placement(ready)
    except PlacementError as error:
        subject = error.subject.replace("the recipe", recipe)
        raise CannotBePlacedError(subject, ready, error.violations) from error
    start = RunInput(recipe=_portable(recipe), steps=steps, overrides=overrides)
    return Checked(ready, plan, start)


def _cured_by(recipe: Recipe, violations: tuple[Violation, ...]) -> dict[str, Scalar]:
    """Tried, since a person types them as they stand."""
    settings = agreed(violations)
    if not all(violation.settings for violation in violations):
        return {}
    try:
        plan_inference_placement(read_recipe(recipe.model_dump(mode="json"), settings))
    except (RecipeError, PlacementError):
        return {}
    return settings


def load(recipe: str, overrides: dict[str, Any], how: Loader = load_recipe) -> Recipe:
    """The recipe of a name or a file.

    Raises:
        RecipeError: as ``how`` does, or for a file that cannot be read.
    """
    try:
        return how(recipe, overrides)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{recipe} cannot be read: {error}") from error


def resolve(recipe: str, assignments: list[str], home: Path) -> Recipe:
    """The recipe as a run on the local stack of ``home`` would use it: also what other fields
    decide is filled in. It plans to the same placement; errors as of :func:`check`.
    """
    checked = check(recipe, assignments)
    plan, read = checked.plan, checked.recipe
    changes: dict[str, Any] = {
        "mode": plan.mode,
        "cluster.gpus_per_node": plan.gpus_per_node,
        "staging.url": read.staging.url or (home.resolve() / "store").as_uri(),
    }
    for role in _MODELS:
        section = getattr(read, role)
        if section is None:
            continue
        placed = [p for p in plan.placements if p.role == role]
        if placed and section.num_gpus is None:
            changes[f"{role}.num_gpus"] = sum(p.num_gpus for p in placed)
        first = getattr(section, "model_id", placed[0].model_id if placed else None)
        engines = [(first, role, section.engine)]
        for number, extra in enumerate(section.extra_models):
            engines.append((extra.model_id, f"{role}.extra_models.{number}", extra.engine))
        shares = {p.model_id: p.ray_gpu_fraction for p in placed}
        changes |= {
            f"{field}.engine.ray_gpu_fraction": shares[model]
            for model, field, engine in engines
            if engine.ray_gpu_fraction == "auto" and model in shares
        }
    return load_recipe(read.model_dump(mode="json", exclude_none=True), changes)


def check_run_id(run: str) -> str:
    """Ids of a run's parts are made from its own with dots; folders and actors are named after it.

    Raises:
        CommandError: it cannot be one.
    """
    if not RUN_ID.fullmatch(run):
        raise CommandError(
            f"{run!r} cannot be a run id.",
            cure="Use 1 to 64 letters, digits, - and _, a letter or digit first.",
        )
    return run


def _portable(recipe: str) -> str | dict[str, Any]:
    """A name stays one; a file travels as its content, since workers may not see it."""
    if recipe in shipped_recipes():
        return recipe
    return read_yaml(Path(recipe).read_text())


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Dotted key and value of every model, and of every file of prompts."""
    yield from named_data(recipe)
    for role in _MODELS:
        section = getattr(recipe, role)
        if section is not None:
            yield f"{role}.model", section.model
            for number, extra in enumerate(section.extra_models):
                yield f"{role}.extra_models.{number}.model", extra.model


def _is_relative(named: str) -> bool:
    path = Path(named)
    try:
        return not path.is_absolute() and path.exists()
    except OSError:
        return False  # a text that is longer than a path can be
