"""A store in a temporary folder, an upstream, and the arguments of a phase."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relax_infer.config import Recipe, load_recipe
from relax_infer.contracts.refs import RunRef
from relax_infer.samples import StagingStore, load_task
from tests.samples.upstream import Upstream, serving


@pytest.fixture
def store(tmp_path: Path) -> StagingStore:
    return StagingStore(RunRef(run="run-1", store=tmp_path.as_uri()))


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with serving() as server:
        yield server


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(
        "quickstart",
        {
            "rollout.prompts_per_step": 4,
            "rollout.samples_per_prompt": 2,
            "rollout.max_concurrency": 2,
        },
    )


class Settled:
    """Remembers which prefixes were settled, and what had been asked by then."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.calls: list[tuple[str, int]] = []

    async def __call__(self, prefix: str) -> int:
        self.calls.append((prefix, len(self.upstream.asked)))
        return 0


@pytest.fixture
def settled(upstream: Upstream) -> Settled:
    return Settled(upstream)


@pytest.fixture
def phase(
    store: StagingStore, recipe: Recipe, upstream: Upstream, settled: Settled
) -> dict[str, Any]:
    """What every phase takes, against the upstream."""
    return {
        "store": store,
        "step": 1,
        "task": load_task(recipe),
        "recipe": recipe,
        "weight_version": 3,
        "settle": settled,
        "beat": lambda done, total: None,
    }
