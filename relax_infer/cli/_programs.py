"""Programs that a run on this machine needs, looked for before anything starts."""

import importlib.util
import shutil
from collections.abc import Iterator

from relax_infer.cli._errors import CommandError
from relax_infer.config import Recipe, started_engines

_PACKAGES = {"sglang": "sglang", "sglang_router": "sglang-router", "megatron": "megatron-core"}
"""Module, and what is installed for it."""


def require_programs(recipe: Recipe) -> None:
    """
    Raises:
        CommandError: names everything that is missing.
    """
    missing = list(_missing(recipe))
    if missing:
        raise CommandError(
            f"This machine cannot run recipe {recipe.name}: {'; '.join(missing)}.",
            cure="Install the project with `make install` and use its .venv; an interpreter of"
            " engines must be one of this machine.",
        )


def _missing(recipe: Recipe) -> Iterator[str]:
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            yield f"{package} is not installed"
    for field, engine in started_engines(recipe):
        if engine.python is not None and shutil.which(engine.python) is None:
            yield f"{field}.python: there is no program {engine.python}"
