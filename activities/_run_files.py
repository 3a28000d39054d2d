"""The resolved recipe and the staging store of a run, as every activity finds them again."""

from functools import lru_cache

from relax_infer.config import Recipe
from relax_infer.contracts.refs import RunRef
from relax_infer.samples import StagingStore, load_task
from relax_infer.samples.tasks import Task


@lru_cache(maxsize=64)
def store_of(run: RunRef) -> StagingStore:
    return StagingStore(run)


@lru_cache(maxsize=64)
def recipe_of(run: RunRef) -> Recipe:
    """The recipe that ``resolve_recipe`` wrote; immutable for the run."""
    return Recipe.model_validate(store_of(run).read_json("recipe.json"))


@lru_cache(maxsize=64)
def task_of(run: RunRef) -> Task:
    return load_task(recipe_of(run).data)
