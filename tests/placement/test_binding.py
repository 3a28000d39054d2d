import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.placement import bind_pool, find_pool, release_pool

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def free_in_bundles() -> list[float]:
    """What is free of each bundle's GPU; a probe that lives holds a part of it."""
    import ray

    free = ray.available_resources()
    return [share for name, share in free.items() if re.match(r"GPU_group_\d+_", name)]


async def test_each_bundle_is_told_its_own_device_and_no_probe_is_left() -> None:
    rows = await bind_pool("run-1", 2, 60)
    assert sorted(r.bundle for r in rows) == [0, 1]
    assert [r.gpu_id for r in rows] == [0, 1]
    assert len({r.node_id for r in rows}) == 1
    assert all(r.gpu_uuid is None for r in rows)  # these GPUs are pretended
    deadline = time.monotonic() + 60
    while (free := free_in_bundles()) != [1.0, 1.0]:
        assert time.monotonic() < deadline, free
        await asyncio.sleep(0.05)
    await release_pool("run-1")


async def test_binding_again_finds_the_same_pool() -> None:
    first = await bind_pool("run-2", 2, 60)
    group = find_pool("run-2")
    assert await bind_pool("run-2", 2, 60) == first
    assert find_pool("run-2") == group
    with pytest.raises(PermanentError, match="pool of 2 GPUs, its recipe says 1"):
        await bind_pool("run-2", 1, 5)
    assert find_pool("run-2") == group
    await release_pool("run-2")


async def test_a_pool_that_can_never_fit_names_what_the_cluster_has_and_is_given_back() -> None:
    with pytest.raises(PermanentError, match="1 nodes has 2 GPUs and 4 CPUs"):
        await bind_pool("run-3", 3, 1)
    assert find_pool("run-3") is None


async def test_a_pool_that_others_hold_names_them_and_may_be_tried_again() -> None:
    await bind_pool("run-4", 2, 60)
    with pytest.raises(TransientError, match=r"relax-run-4\.pool"):
        await bind_pool("run-5", 1, 1)
    await release_pool("run-4")
    assert len(await bind_pool("run-5", 1, 60)) == 1
    await release_pool("run-5")


async def test_release_is_idempotent_and_takes_the_actors_along() -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    await bind_pool("run-6", 1, 60)

    class Holder:
        def there(self) -> bool:
            return True

    place = PlacementGroupSchedulingStrategy(find_pool("run-6"), placement_group_bundle_index=0)
    holder = ray.remote(Holder).options(num_cpus=0, num_gpus=0.5, scheduling_strategy=place)
    actor = holder.remote()
    assert await actor.there.remote()
    await release_pool("run-6")
    await release_pool("run-6")
    with pytest.raises(ray.exceptions.ActorDiedError):
        await actor.there.remote()


@pytest.fixture(autouse=True)
async def each_test_gives_its_pools_back() -> AsyncIterator[None]:
    yield
    left = [run for run in (f"run-{n}" for n in range(1, 7)) if find_pool(run)]
    for run in left:
        await release_pool(run)
    assert left == []
