"""The resolved recipe and the staging store of a run, as every activity finds them again."""

from functools import lru_cache

from relax_infer.config import Recipe
from relax_infer.contracts.refs import RunRef
from relax_infer.samples import StagingStore, load_task
from relax_infer.samples.tasks import Task


def store_of(run: RunRef) -> StagingStore:
    return _store(run.run, run.store)


def recipe_of(run: RunRef) -> Recipe:
    """The recipe that ``resolve_recipe`` wrote; immutable for the run."""
    return _recipe(run.run, run.store)


def task_of(run: RunRef) -> Task:
    return _task(run.run, run.store)


@lru_cache(maxsize=64)
def _store(run: str, store: str) -> StagingStore:
    return StagingStore(RunRef(run=run, store=store))


@lru_cache(maxsize=64)
def _recipe(run: str, store: str) -> Recipe:
    return Recipe.model_validate(_store(run, store).read_json("recipe.json"))


@lru_cache(maxsize=64)
def _task(run: str, store: str) -> Task:
    return load_task(_recipe(run, store))
