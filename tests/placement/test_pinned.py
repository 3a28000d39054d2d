"""Pools on the nodes of the spread that was found, where those that Ray chose cut an engine."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from relax_infer.placement import PlacementError, bind_plan, bind_pool, binding, release_pools
from tests.placement.conftest import cluster_of_two
from tests.placement.recipes import document, engine, plan

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def two_addresses() -> Iterator[Any]:
    """Two nodes of eight pretended GPUs, each with an address of its own, as hosts have."""
    with cluster_of_two(node_ip_address="127.0.0.2") as cluster:
        yield cluster


@pytest.mark.usefixtures("two_addresses")
async def test_engines_that_rays_choice_would_cut_are_put_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six and five GPUs are free: Ray packs six and two, two engines of four need four and four."""
    made = plan(document("defer", 8, rollout=engine(8, 4)))
    await bind_pool("other", 3, 60, strategy="STRICT_PACK")
    await bind_pool("another", 2, 60, strategy="STRICT_PACK")
    assert sorted(n.free_gpus for n in binding.living_nodes()) == [5, 6]
    with monkeypatch.context() as patch:
        patch.setattr(binding, "_pinned", _none)
        with pytest.raises(PlacementError, match="must be on one node"):
            await bind_plan("run", made, 60)
    rows = (await bind_plan("run", made, 60))["pool"]
    assert sorted(Counter(row.node_id for row in rows).values()) == [4, 4]
    assert (await bind_plan("run", made, 60))["pool"] == rows
    for run in ("run", "other", "another"):
        await release_pools(run)


async def _none(*_: object) -> None:
    return None
