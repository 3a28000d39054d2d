"""The JSON schema of recipes, for editors."""

from typing import Any

from relax_infer.config.recipe import Recipe


def recipe_schema() -> dict[str, Any]:
    """JSON schema 2020-12 of a recipe as a person writes it."""
    schema = Recipe.model_json_schema(mode="validation")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "relax-infer recipe",
    }
    return {**head, **{key: value for key, value in schema.items() if key not in head}}
