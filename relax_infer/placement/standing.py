"""A run's pools as they were bound: kept in its store, and made again where Ray has lost them.

Ray forgets placement groups with the cluster that held them. What was bound is written down once,
so that the same GPUs are reserved again by whoever needs them first, for as long as the run has
not let go of them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_infer.contracts.base import Message
from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.refs import RunRef
from relax_infer.placement.again import make_again, only_one
from relax_infer.placement.pools import asked, find_pool, pool_name, release_pool, release_pools
from relax_infer.samples.store import StagingStore

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

RESTORE_SECONDS = 120.0
"""For a pool that Ray lost to be reserved again and probed."""

_restoring: dict[tuple[str, str], asyncio.Lock] = {}


class Restored(Message):
    """The placement group that took the place of a lost one."""

    group: str
    bundles: dict[int, int]
    """Bundle as it was bound → bundle of ``group`` on the same device, or else on the same node."""


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

    def make_actor(
        self, kind: type, name: str, namespace: str, bundle: int, gpus: float, *arguments: object
    ) -> Any:
        """A detached actor with a share of the device of a bound bundle, or the one that is there.

        Blocks for calls to Ray's control plane.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.bundles.get(bundle, bundle),
        )
        return (
            ray.remote(kind)
            .options(
                name=name,
                namespace=namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                num_gpus=gpus,
                max_concurrency=64,
                scheduling_strategy=place,
            )
            .remote(*arguments)
        )


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
        TransientError: it was still there after ``timeout`` seconds.
    """
    await asyncio.to_thread(StagingStore(run).remove, _name(pool))
    await release_pool(run.run, timeout, pool)


async def let_go_of_pools(run: RunRef, timeout: float = 60.0) -> None:
    """Remove every pool of the run likewise."""
    await asyncio.to_thread(StagingStore(run).remove, "placement")
    await release_pools(run.run, timeout)


async def standing_pool(run: RunRef, pool: str, who: str) -> StandingPool:
    """The pool, on the GPUs that it was bound to; made again where Ray has lost it.

    Args:
        who: needs it, for messages.

    Raises:
        UnconfirmedError: there is none, and none can be made (again) now.
        PermanentError: its record is damaged.
        TransientError: the store or Ray's control plane does not answer.
    """
    lock = _restoring.setdefault((run.store, f"{run.run}.{pool}"), asyncio.Lock())
    async with lock:
        there, record = await _as_it_stands(run, pool, who)
        if there is not None:
            return there
        assert record is not None
        try:
            async with only_one(run.run, pool, RESTORE_SECONDS):
                there, _ = await _as_it_stands(run, pool, who)  # another worker was faster
                return there or await _again(run, pool, record)
        except (PermanentError, TransientError) as error:
            raise _not_yet(run, pool, who, error) from error


async def _as_it_stands(
    run: RunRef, pool: str, who: str
) -> tuple[StandingPool | None, PoolRecord | None]:
    """The pool, None where it must be made again; and its record, None where nobody wrote one."""
    group = await asked(find_pool, run.run, pool)
    record = await asyncio.to_thread(_read, run, pool)
    if record is None:
        if group is None:
            raise UnconfirmedError(
                f"Run {run.run} has no placement group {pool}: {who} cannot be reached or"
                " looked for.",
                cure="The run has let go of its GPUs, or never had any.",
            )
        return StandingPool(group, group.id.hex(), {}), None
    now = group.id.hex() if group is not None else None
    if group is not None and now == record.group:
        return StandingPool(group, record.group, {}), record
    known = record.restored
    if group is not None and known is not None and now == known.group:
        return StandingPool(group, record.group, known.bundles), record
    return None, record


async def _again(run: RunRef, pool: str, record: PoolRecord) -> StandingPool:
    group, rows = await make_again(run.run, pool, record.rows, RESTORE_SECONDS)
    restored = Restored(group=group.id.hex(), bundles=same_devices(record.rows, rows))
    if await asyncio.to_thread(_read, run, pool) is None:  # the run let go of it meanwhile
        await release_pool(run.run, pool=pool)
        raise UnconfirmedError(f"Run {run.run} has let go of {pool} while it was made again.")
    await asyncio.to_thread(_write, run, pool, record.model_copy(update={"restored": restored}))
    return StandingPool(group, record.group, restored.bundles)


def _not_yet(run: RunRef, pool: str, who: str, error: RelaxError) -> UnconfirmedError:
    return UnconfirmedError(
        f"Ray has lost placement group {pool} of run {run.run}, and it cannot be made again yet:"
        f" {who} cannot be reached or looked for. {error}",
        cure="Is every node of the cluster back (`ray status`)? Each probe tries it again.",
    )


def same_devices(bound: Iterable[BundleBinding], now: Iterable[BundleBinding]) -> dict[int, int]:
    """Bound bundle → the one that has its device now; where none has, another one of its node, and
    else any: who comes up there sees that it is not where it was bound.

    Both must be of the same length.
    """
    left, found = list(now), dict[int, int]()
    waiting = list(bound)
    for fits in (_same_device, _same_node, _any):
        for row in list(waiting):
            there = next((each for each in left if fits(row, each)), None)
            if there is not None:
                found[row.bundle] = there.bundle
                left.remove(there)
                waiting.remove(row)
    return found


def _same_device(bound: BundleBinding, now: BundleBinding) -> bool:
    if bound.gpu_uuid is not None:
        return bound.gpu_uuid == now.gpu_uuid
    return _same_node(bound, now) and bound.gpu_id == now.gpu_id


def _same_node(bound: BundleBinding, now: BundleBinding) -> bool:
    return bound.node_ip == now.node_ip


def _any(bound: BundleBinding, now: BundleBinding) -> bool:
    return True


def _name(pool: str) -> str:
    return f"placement/{pool}.json"


def _write(run: RunRef, pool: str, record: PoolRecord) -> None:
    StagingStore(run).write_json(_name(pool), record.model_dump(mode="json"), replace=True)


def _read(run: RunRef, pool: str) -> PoolRecord | None:
    store = StagingStore(run)
    try:
        return PoolRecord.model_validate(store.read_json(_name(pool)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PermanentError(
            f"{store.url(_name(pool))} is damaged: {error}",
            cure="Nobody knows which GPUs the run was bound to: stop it, and go on in another run"
            " with --from.",
        ) from error
