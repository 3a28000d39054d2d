"""What a recipe may plan but no run carries out yet."""

from collections.abc import Iterator

from relax_infer.config.load import RecipeError
from relax_infer.config.placed import Engine
from relax_infer.config.recipe import Recipe
from relax_infer.contracts.counted import counted


def require_runnable(recipe: Recipe) -> None:
    """A run has one policy, which its trainer trains.

    Raises:
        RecipeError: names every field that goes beyond it.
    """
    faults = list(_beyond(recipe))
    if faults:
        raise RecipeError(
            f"recipe {recipe.name} can be planned but not run yet: {'; '.join(faults)}.",
            cure="Change these fields; `relax-infer plan` shows the plan as it is.",
        )


def _beyond(recipe: Recipe) -> Iterator[str]:
    for name in ("debug", "reference", "actor_fwd"):
        if getattr(recipe, name) is not None:
            yield f"{name}: is not used by runs yet"
    if not recipe.train.offload:
        yield "train.offload: the trainer of a run always offloads"
    for field, engine in started_engines(recipe):
        if engine.offload == "none":
            yield f"{field}.offload: none, the engines of a run let their GPUs go in every mode"
    critic = recipe.critic
    if critic is not None and recipe.train.algorithm.estimator != "ppo":
        yield "critic: only train.algorithm.estimator ppo uses one"
    if critic is not None and recipe.mode == "decoupled":
        yield "critic: runs train it on the trainer's own ranks, mode decoupled gives it others"
    if critic is not None and critic.ranks != recipe.train.ranks:
        yield (
            f"critic.ranks: {critic.ranks}, runs train the critic on the trainer's own"
            f" {counted(recipe.train.ranks, 'rank')}"
        )
    rollout = recipe.rollout
    if rollout.external:
        yield "rollout.external: runs start their own engines"
    if rollout.server_groups is not None:
        yield "rollout.server_groups: engines of runs are all regular"
    if rollout.extra_models:
        yield "rollout.extra_models: runs train one policy"


def started_engines(recipe: Recipe) -> Iterator[tuple[str, Engine]]:
    """Dotted key and section of the engines that a run would start."""
    yield "rollout.engine", recipe.rollout.engine
    for role, section in (("genrm", recipe.genrm), ("teacher", recipe.teacher)):
        if section is not None and recipe.serves(role):
            yield f"{role}.engine", section.engine
            for n, model in enumerate(section.extra_models):
                yield f"{role}.extra_models.{n}.engine", model.engine
