"""Generated samples, by group."""

import asyncio

from relax_infer.config.recipe import Recipe
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples.sample import Sample, from_table
from relax_infer.samples.store import StagingStore


async def groups_of(store: StagingStore, source: StagedRef, recipe: Recipe) -> list[list[Sample]]:
    """The staged samples as one list per group ordinal, which must run from 0 without a gap."""
    check_capacity(source, recipe)
    samples = from_table(await asyncio.to_thread(store.read_table, source))
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    if sorted(groups) != list(range(len(groups))):
        raise PermanentError(f"{source.uri}: groups {sorted(groups)} have a gap")
    return [groups[ordinal] for ordinal in range(len(groups))]


def check_capacity(source: StagedRef, recipe: Recipe) -> None:
    """The recipe's limit holds of what was really generated, too, before anything is scored."""
    if source.rows > recipe.staging.max_samples:
        raise PermanentError(
            f"{source.uri} has {source.rows} samples, staging.max_samples is"
            f" {recipe.staging.max_samples}",
            cure="Nothing was scored. Raise the limit, or lower rollout.prompts_per_step.",
        )
