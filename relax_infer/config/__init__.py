"""Typed recipes."""

from relax_infer.config.load import (
    RecipeError,
    load_recipe,
    parse_overrides,
    read_recipe,
    recipe_sha256,
    shipped_recipes,
)
from relax_infer.config.recipe import Recipe
from relax_infer.config.runnable import require_runnable, started_engines

__all__ = [
    "Recipe",
    "RecipeError",
    "load_recipe",
    "parse_overrides",
    "read_recipe",
    "recipe_sha256",
    "require_runnable",
    "shipped_recipes",
    "started_engines",
]
