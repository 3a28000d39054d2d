"""Pools that Ray has lost are made again on the GPUs that they were bound to (real Ray)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.refs import RunRef
from relax_infer.placement import bind_pool, find_pool, release_pools, standing
from relax_infer.placement.again import only_one
from relax_infer.placement.standing import (
    StandingPool,
    keep_pools,
    let_go_of_pool,
    let_go_of_pools,
    same_devices,
    standing_pool,
)
from tests.workflows.scripted_world import until


def on_ray(test: Any) -> Any:
    marks = (
        pytest.mark.real,
        pytest.mark.timeout(300),
        pytest.mark.usefixtures("two_nodes"),
        pytest.mark.filterwarnings("ignore::ResourceWarning"),
    )
    for mark in marks:
        test = mark(test)
    return test


def row(bundle: int, node: str, gpu: int, uuid: str | None = None) -> BundleBinding:
    return BundleBinding(
        bundle=bundle, node_id=f"id-{node}", node_ip=node, gpu_id=gpu, gpu_uuid=uuid
    )


def test_each_bundle_goes_back_to_its_device() -> None:
    bound = [row(0, "a", 0), row(1, "a", 1), row(2, "b", 0)]
    now = [row(0, "b", 0), row(1, "a", 1), row(2, "a", 0)]
    assert same_devices(bound, now) == {0: 2, 1: 1, 2: 0}


def test_a_real_device_is_known_by_its_uuid_wherever_it_is_now() -> None:
    bound = [row(0, "a", 0, "GPU-x"), row(1, "a", 1, "GPU-y")]
    now = [row(0, "a", 0, "GPU-y"), row(1, "a", 1, "GPU-x")]
    assert same_devices(bound, now) == {0: 1, 1: 0}


class Where:
    """An actor that says on which device it is."""

    def device(self) -> tuple[str, int]:
        import ray
        import ray.util

        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])


async def device_of(pool: StandingPool, bundle: int) -> tuple[str, int]:
    import ray

    actor: Any = await pool.make_actor(Where, f"where-{bundle}-{id(pool)}", "relax", bundle, 0.1)
    try:
        return await asyncio.wait_for(actor.device.remote(), 60)
    finally:
        ray.kill(actor)


@pytest.fixture
async def ref(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunRef]:
    monkeypatch.setattr(standing, "WAIT_SECONDS", 200.0)  # 16 actors on two cores take a while
    yield RunRef(run="standing", store=f"file://{tmp_path}")
    await release_pools("standing")
    await release_pools("another")


async def bound(ref: RunRef, gpus: int) -> list[BundleBinding]:
    rows = await bind_pool(ref.run, gpus, 60.0)
    await keep_pools(ref, {"pool": rows})
    return rows


async def need(ref: RunRef) -> StandingPool:
    return await standing_pool(ref, "pool", "its engine")


@on_ray
async def test_a_lost_pool_is_made_again_on_the_same_devices(ref: RunRef):
    """And by one of those who need it at once; its holders go by the fences of the old one."""
    rows = await bound(ref, 16)
    first = await need(ref)
    assert (first.bound_as, dict(first.bundles)) == (first.group.id.hex(), {})
    await release_pools(ref.run)
    assert find_pool(ref.run) is None
    again, other = await asyncio.gather(need(ref), need(ref))
    assert again.group.id == other.group.id != first.group.id
    assert again.bound_as == other.bound_as == first.bound_as
    for each in (rows[0], rows[7], rows[15]):
        assert (await device_of(again, each.bundle))[1] == each.gpu_id
    assert sorted(again.bundles) == sorted(r.bundle for r in rows)


@on_ray
async def test_who_cannot_wait_is_told_and_the_next_one_finds_it(
    ref: RunRef, monkeypatch: pytest.MonkeyPatch
):
    """A probe has a minute; what it began goes on without it."""
    await bound(ref, 2)
    await release_pools(ref.run)
    with monkeypatch.context() as patched:
        patched.setattr(standing, "WAIT_SECONDS", 0.01)
        with pytest.raises(UnconfirmedError, match="It is being made again"):
            await need(ref)
        asked = asyncio.create_task(need(ref))
        await asyncio.sleep(0)
        asked.cancel()
    assert (await need(ref)).group.bundle_count == 2


@on_ray
async def test_two_processes_make_it_once(ref: RunRef, monkeypatch: pytest.MonkeyPatch):
    """Ray knows one group of a name: who comes second takes what the first one made."""
    await bound(ref, 2)
    await release_pools(ref.run)
    monkeypatch.setattr(standing, "_being_made", _Forgetful())
    one, two, three = await asyncio.gather(need(ref), need(ref), need(ref))
    assert one.group.id == two.group.id == three.group.id
    assert one.bundles == two.bundles == three.bundles


@pytest.mark.wide
@on_ray
async def test_devices_that_are_not_the_first_free_ones_are_found_again(ref: RunRef):
    """A run that began while another held the first GPUs; that one has ended since."""
    await bind_pool("another", 3, 60.0)
    rows = await bound(ref, 4)
    await release_pools("another")
    await release_pools(ref.run)
    stands = await need(ref)
    for each in rows:
        assert (await device_of(stands, each.bundle))[1] == each.gpu_id
    await release_pools(ref.run)
    assert len(await bind_pool("another", 16, 60.0)) == 16  # no spacer is left


@pytest.mark.wide
@on_ray
async def test_while_others_hold_the_gpus_it_waits_and_says_so(
    ref: RunRef, monkeypatch: pytest.MonkeyPatch
):
    await bound(ref, 2)
    await release_pools(ref.run)
    await bind_pool("another", 15, 60.0)
    with monkeypatch.context() as patched:
        patched.setattr(standing, "RESTORE_SECONDS", 2.0)
        with pytest.raises(
            UnconfirmedError, match="lost placement group pool of run standing"
        ) as e:
            await need(ref)
    assert "held by relax-another.pool" in str(e.value)
    assert find_pool(ref.run) is None
    await release_pools("another")
    assert (await need(ref)).bound_as


@on_ray
async def test_what_the_run_has_let_go_of_nobody_makes_again(
    ref: RunRef, monkeypatch: pytest.MonkeyPatch
):
    await bound(ref, 1)
    await let_go_of_pools(ref)
    await let_go_of_pools(ref)
    with pytest.raises(UnconfirmedError, match="has no placement group pool"):
        await need(ref)
    # The same while somebody is about to make it.
    await bound(ref, 1)
    await release_pools(ref.run)
    as_it_stands = standing._as_it_stands

    async def overtaken(run: RunRef, pool: str) -> Any:
        seen = await as_it_stands(run, pool)
        await asyncio.to_thread(standing.StagingStore(ref).remove, "placement")
        return seen

    monkeypatch.setattr(standing, "_as_it_stands", overtaken)
    with pytest.raises(UnconfirmedError, match="has let go of pool meanwhile"):
        await need(ref)
    assert find_pool(ref.run) is None


@on_ray
async def test_who_waits_for_a_pool_that_the_run_lets_go_of_is_told_and_no_lock_is_left(
    ref: RunRef,
):
    await bound(ref, 2)
    await release_pools(ref.run)
    waits = asyncio.create_task(need(ref))
    await until(lambda: (ref.store, ref.run, "pool") in standing._being_made)
    await let_go_of_pools(ref)
    with pytest.raises(UnconfirmedError, match="has just let go of it"):
        await waits
    assert find_pool(ref.run) is None
    async with only_one(1.0):
        pass


@on_ray
async def test_a_pool_that_is_bound_anew_is_the_one_that_stands(ref: RunRef):
    await bound(ref, 1)
    await let_go_of_pool(ref, "pool")
    await bound(ref, 2)
    stands = await need(ref)
    assert stands.group.bundle_count == 2
    assert stands.bound_as == stands.group.id.hex()


@on_ray
async def test_a_damaged_record_is_named(ref: RunRef, tmp_path: Path):
    await bound(ref, 1)
    (tmp_path / "standing" / "placement" / "pool.json").write_text('{"group": ')
    with pytest.raises(PermanentError, match=r"placement/pool\.json is damaged"):
        await need(ref)


class _Forgetful(dict[Any, Any]):
    """As if each call came from another process."""

    def get(self, key: Any, default: Any = None) -> Any:
        return None
