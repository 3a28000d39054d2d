"""Bundles that ask for their node: where Ray's own choice cuts an engine, and out of order."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from relax_infer.placement import (
    PlacementError,
    bind_plan,
    bind_pool,
    binding,
    model_placement,
    release_pools,
    validate_bound_placement,
)
from relax_infer.placement.binding import OF_A_NODE, bind_bundles
from relax_infer.placement.ray_view import group_table
from relax_infer.placement.room import NEEDS
from relax_infer.placement.standing import StandingPool
from tests.placement.conftest import cluster_of_two, free_in_bundles
from tests.placement.recipes import document, engine, plan

pytestmark = [
    pytest.mark.wide,
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


@pytest.mark.usefixtures("two_addresses")
async def test_a_real_group_with_shuffled_bundles_is_put_in_the_plans_order() -> None:
    """Each bundle of the group asks for its node, in an order that no node has for itself."""
    first, second = sorted(binding.living_nodes(), key=lambda node: node.node_id)
    nodes = [second, first, first, second] * 4
    bundles = [{**NEEDS, f"node:{node.node_ip}": OF_A_NODE} for node in nodes]
    group, _ = await bind_bundles("run", "pool", bundles, 60)
    placed = group_table()[group.id.hex()]["bundles_to_node_id"]
    assert [placed[bundle] for bundle in range(16)] == [node.node_id for node in nodes]

    made = plan(document("defer", 16, rollout=engine(16, 16), genrm=engine(16, 8)))
    rows = (await bind_plan("run", made, 60))["pool"]
    assert [row.node_id for row in rows] == [first.node_id] * 8 + [second.node_id] * 8
    assert [row.gpu_id for row in rows] == [*range(8), *range(8)]
    assert sorted(row.bundle for row in rows[:8]) == [k for k in range(16) if nodes[k] is first]
    wide = model_placement(made, "rollout")
    assert wide is not None
    assert validate_bound_placement(wide, rows) == rows
    turned = sorted(rows, key=lambda row: row.bundle)
    with pytest.raises(PlacementError, match="one node"):
        validate_bound_placement(wide, turned)
    await release_pools("run")


@pytest.mark.usefixtures("two_addresses")
async def test_an_engines_actor_reserves_its_share_of_one_bundle_and_no_cpu() -> None:
    """Contract 8.4; the engine's own processes are not Ray's to count."""
    import ray

    class Engine:
        def there(self) -> bool:
            return True

    group, _ = await bind_bundles("run", "pool", [NEEDS] * 2, 60)
    pool = StandingPool(group, "bound", {})
    actor = await pool.make_actor(Engine, "engine", "relax-run", 1, 0.3)
    assert await actor.there.remote()
    deadline = time.monotonic() + 30
    while sorted(free_in_bundles()) != pytest.approx([0.7, 1.0]):  # Ray tells it a little later
        assert time.monotonic() < deadline, free_in_bundles()
        await asyncio.sleep(0.05)
    free = ray.available_resources()
    cpus = [share for name, share in free.items() if re.match(r"CPU_group_\d+_", name)]
    assert cpus == [1.0, 1.0]
    await release_pools("run")


async def _none(*_: object) -> None:
    return None
