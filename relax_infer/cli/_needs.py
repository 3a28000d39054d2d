"""What a run on this machine's own stack needs, looked for before anything starts."""

import importlib.util
import shutil
from collections.abc import Iterator, Sequence

from relax_infer.cli._errors import CommandError
from relax_infer.cli._home import LocalStack
from relax_infer.cli._machine import gpu_count
from relax_infer.config import Recipe, started_engines
from relax_infer.placement import Violation

_PACKAGES = {"sglang": "sglang", "sglang_router": "sglang-router", "megatron": "megatron-core"}
"""Module, and what is installed for it."""


def require_needs(recipe: Recipe, stack: LocalStack | None, running: Sequence[str]) -> None:
    """
    Args:
        stack: the one that there is.
        running: ids of the runs that go on in it.

    Raises:
        CommandError: names everything that is missing.
    """
    from relax_infer.placement.here import lacking_here

    missing = [
        *_programs(recipe),
        *_gpus(recipe, stack, running),
        *lacking_here(recipe),
    ]
    if missing:
        reasons = "".join(f"\n  {each}" for each in missing)
        raise CommandError(f"This machine cannot run recipe {recipe.name}:{reasons}")


def _programs(recipe: Recipe) -> Iterator[Violation]:
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            cure = "Install the project with `make install` and use its .venv."
            yield Violation("recipe", f"{package} is not installed.", cure)
    for field, engine in started_engines(recipe):
        if engine.python is not None and shutil.which(engine.python) is None:
            cure = "Name an interpreter of this machine."
            yield Violation(f"{field}.python", f"there is no program {engine.python}.", cure)


def _gpus(recipe: Recipe, stack: LocalStack | None, running: Sequence[str]) -> Iterator[Violation]:
    if recipe.cluster.device == "cuda" and gpu_count() == 0:
        yield Violation(
            "cluster.device",
            "cuda, and this machine has no GPU: those of its local stack are pretended.",
            "Set it to auto or cpu, or run on a cluster: TEMPORAL_ADDRESS names its server.",
        )
    if stack is None or stack.gpus is None or "ray" in stack.dead:
        return
    wanted = recipe.cluster.gpus
    if stack.gpus < wanted:
        cure = "Lower it, or run `relax-infer down` and this command again."
        if running:
            cure += f" {', '.join(running)} would stand still meanwhile, and go on then."
        rule = f"{wanted}, and the local stack in {stack.home} has {stack.gpus}."
        yield Violation("cluster.gpus", rule, cure)
