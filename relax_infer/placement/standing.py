"""A run's pools as they were bound: kept in its store, and made again where Ray has lost them.

Ray forgets placement groups with the cluster that held them. What was bound is written down once,
so that the same GPUs are reserved again by whoever needs them first, for as long as the run has
not let go of them.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import (
    PermanentError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.refs import RunRef
from relax_infer.placement.again import device_of, make_again, only_one
from relax_infer.placement.pools import asked, find_pool, pool_name, release_pool, release_pools
from relax_infer.samples.store import StagingStore

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

RESTORE_SECONDS = 120.0
"""For a pool that Ray lost to be reserved again and probed, and to wait for others that are."""
WAIT_SECONDS = 30.0
"""For one who needs it meanwhile; it goes on being made, and the next one finds it."""

_being_made: dict[tuple[str, str, str], "asyncio.Task[StandingPool]"] = {}
"""By store, run and pool, of this process."""


class Restored(Message):
    """The placement group that took the place of a lost one."""

    group: str
    bundles: dict[int, int]
    """Bundle as it was bound → bundle of ``group`` on the same device."""


class PoolRecord(Message):
    """One pool of a run, as it was bound."""

    group: str
    """Ray's id of the placement group."""
    rows: tuple[BundleBinding, ...]
    restored: Restored | None = None
    """None: Ray has not lost the group since."""


@dataclass(frozen=True)
class StandingPool:
    """A pool that is there now."""

    group: "PlacementGroup"
    bound_as: str
    """Ray's id of the group that was bound: what the fences of the pool's holders go by."""
    bundles: Mapping[int, int]
    """Bundle as it was bound → bundle of ``group``; those that are not named are themselves."""

    async def make_actor(
        self, kind: type, name: str, namespace: str, bundle: int, gpus: float, *arguments: object
    ) -> Any:
        """A detached actor with a share of the device of a bound bundle, or the one that is there.

        Raises:
            TransientError: Ray's control plane did not answer.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles.get(bundle, bundle),
        )
        remote = ray.remote(kind).options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=64,
            scheduling_strategy=place,
        )
        return await asked(remote.remote, *arguments)


async def keep_pools(run: RunRef, pools: Mapping[str, Sequence[BundleBinding]]) -> None:
    """Write down what was just bound.

    Raises:
        TransientError: the store or Ray's control plane does not answer.
        UnconfirmedError: a pool was lost since it was bound.
    """
    for pool, rows in pools.items():
        group = await asked(find_pool, run.run, pool)
        if group is None:
            raise UnconfirmedError(f"{pool_name(run.run, pool)} was lost as soon as it was bound.")
        record = PoolRecord(group=group.id.hex(), rows=tuple(rows))
        await asyncio.to_thread(_write, run, pool, record)


async def let_go_of_pool(run: RunRef, pool: str, timeout: float = 60.0) -> None:
    """Remove one pool, with every actor in it; nobody makes it again. Idempotent.

    Raises:
        TransientError: it was still there after ``timeout`` seconds, or is being made.
    """
    async with _nobody_makes_one(run, timeout):
        await asyncio.to_thread(StagingStore(run).remove, _name(pool))
        await release_pool(run.run, timeout, pool)


async def let_go_of_pools(run: RunRef, timeout: float = 60.0) -> None:
    """Remove every pool of the run likewise."""
    async with _nobody_makes_one(run, timeout):
        await asyncio.to_thread(StagingStore(run).remove, "placement")
        await release_pools(run.run, timeout)


@asynccontextmanager
async def _nobody_makes_one(run: RunRef, timeout: float) -> AsyncIterator[None]:
    """This process does not, and no other one is about to."""
    for (store, name, _), task in list(_being_made.items()):
        if (store, name) == (run.store, run.run):
            task.cancel()
            await asyncio.wait([task])
    async with only_one(timeout):
        yield


async def standing_pool(run: RunRef, pool: str, who: str) -> StandingPool:
    """The pool, on the GPUs that it was bound to; made again where Ray has lost it.

    Args:
        who: needs it, for messages.

    Raises:
        UnconfirmedError: there is none, and none can be made (again) now.
        PermanentError: its record is damaged.
        TransientError: the store or Ray's control plane does not answer.
    """
    there, record = await _as_it_stands(run, pool)
    if there is not None:
        return there
    if record is None:
        raise UnconfirmedError(
            f"Run {run.run} has no placement group {pool}: {who} cannot be reached or looked for.",
            cure="The run has let go of its GPUs, or never had any.",
        )
    key = (run.store, run.run, pool)
    task = _being_made.get(key)
    if task is None or task.done():
        task = _being_made[key] = asyncio.create_task(_make_again(run, pool))
        task.add_done_callback(lambda made: made.cancelled() or made.exception())
    try:
        return await asyncio.wait_for(asyncio.shield(task), WAIT_SECONDS)
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        why, cure = "The run has just let go of it.", ""
    except TimeoutError:
        why = f"It is being made again, for {WAIT_SECONDS:g} s or more."
        cure = "Is every node of the cluster back (`ray status`)?"
    except (PermanentError, TransientError) as error:
        why, cure = error.message, error.cure
    raise UnconfirmedError(
        f"Ray has lost placement group {pool} of run {run.run}: {who} cannot be reached or looked"
        f" for. {why}",
        cure=f"{cure} Each probe tries it again.".strip(),
    )


async def _as_it_stands(run: RunRef, pool: str) -> tuple[StandingPool | None, PoolRecord | None]:
    """The pool, None where it must be made again; and its record, None where nobody wrote one."""
    group = await asked(find_pool, run.run, pool)
    record = await asyncio.to_thread(_read, run, pool)
    if group is None:
        return None, record
    now = group.id.hex()
    if record is None or now == record.group:
        return StandingPool(group, now, {}), record
    known = record.restored
    if known is not None and now == known.group:
        return StandingPool(group, record.group, known.bundles), record
    return None, record


async def _make_again(run: RunRef, pool: str) -> StandingPool:
    async with only_one(RESTORE_SECONDS):
        there, record = await _as_it_stands(run, pool)
        if there is not None:
            return there  # another worker was faster
        if record is None:
            raise TransientError(f"Run {run.run} has let go of {pool} meanwhile.")
        group, rows = await make_again(run.run, pool, record.rows, RESTORE_SECONDS)
        restored = Restored(group=group.id.hex(), bundles=same_devices(record.rows, rows))
        record = record.model_copy(update={"restored": restored})
        await asyncio.to_thread(_write, run, pool, record)
        return StandingPool(group, record.group, restored.bundles)


def same_devices(bound: Sequence[BundleBinding], now: Sequence[BundleBinding]) -> dict[int, int]:
    """Bound bundle → the one that has its device now; both have the same devices."""
    left, found = list(now), dict[int, int]()
    for row in bound:
        there = next(each for each in left if device_of(each) == device_of(row))
        found[row.bundle] = there.bundle
        left.remove(there)
    return found


def _name(pool: str) -> str:
    return f"placement/{pool}.json"


def _write(run: RunRef, pool: str, record: PoolRecord) -> None:
    try:
        StagingStore(run).write_json(_name(pool), record.model_dump(mode="json"), replace=True)
    except OSError as error:
        raise TransientError(f"Cannot write {_name(pool)} of run {run.run}: {error}.") from error


def _read(run: RunRef, pool: str) -> PoolRecord | None:
    store = StagingStore(run)
    try:
        return PoolRecord.model_validate(store.read_json(_name(pool)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransientError(f"Cannot read {store.url(_name(pool))}: {error}.") from error
    except ValueError as error:
        raise PermanentError(
            f"{store.url(_name(pool))} is damaged: {error}",
            cure="Nobody knows which GPUs the run was bound to: stop it, and go on in another run"
            " with --from.",
        ) from error
