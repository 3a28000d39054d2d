"""Generated samples, by group."""

import asyncio

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import StagedRef
from relax_infer.samples.sample import Sample, from_table
from relax_infer.samples.store import StagingStore


async def groups_of(store: StagingStore, source: StagedRef) -> list[list[Sample]]:
    """The staged samples as one list per group ordinal, which must run from 0 without a gap."""
    samples = from_table(await asyncio.to_thread(store.read_table, source))
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    if sorted(groups) != list(range(len(groups))):
        raise PermanentError(f"{source.uri}: groups {sorted(groups)} have a gap")
    return [groups[ordinal] for ordinal in range(len(groups))]
