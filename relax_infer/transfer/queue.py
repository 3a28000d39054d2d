"""TransferQueue for activities and the trainer. The caller has done ``ray.init``.

Every call has a deadline of its own, since a call on a dead part of the queue can hang: then it
raises :class:`TransientError`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from relax_infer.contracts.batch import PublishResult
from relax_infer.contracts.failures import (
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.transfer._client import ENVIRONMENT, client_of, prepare_environment
from relax_infer.transfer.owner import (
    CALL_SECONDS,
    NAMESPACE,
    OWNER,
    START_SECONDS,
    QueueDescription,
    QueueOwner,
    queue_parts,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from relax_infer.transfer.rows import PublishedRows

T = TypeVar("T")

_POLL = 0.1
_SEVERAL_CALLS = 8 * CALL_SECONDS


def partition_name(run: str, step: int) -> str:
    """``<run>/train_<step>``: runs of one cluster share the queue."""
    return f"{run}/train_{step}"


async def open_queue() -> QueueDescription:
    """The queue answers, under its detached owner. Idempotent; about 15 s the first time.

    A queue whose controller or storage died is made again, empty: its incarnation differs.

    Raises:
        TransientError: it did not start in time, or another program's controller is in the way.
    """
    from ray.exceptions import RayActorError

    deadline = asyncio.get_running_loop().time() + 2 * START_SECONDS
    while True:
        owner = await asyncio.to_thread(_find_or_make_owner)
        try:
            return await asyncio.wait_for(_of_ray(owner.open.remote()), 2 * START_SECONDS)
        except TimeoutError:
            raise TransientError(
                f"The owner of TransferQueue did not open it within {2 * START_SECONDS:g} s.",
                cure="Look at `ray status`: controller and storage unit need one CPU each.",
            ) from None
        except RayActorError as error:
            # It was dying when it was found; the next one is ours.
            if asyncio.get_running_loop().time() > deadline:
                raise TransientError(f"The owner of TransferQueue dies: {error}") from error
            await asyncio.sleep(_POLL)


async def publish(partition: str, table: "pa.Table") -> PublishResult:
    """Put the published columns of a scored table under their keys and read them back.

    Idempotent: the same table again leaves the partition as it is; another table replaces it.

    Args:
        partition: see :func:`partition_name`.
        table: scored samples; columns as :mod:`relax_infer.transfer.rows` lists them.

    Returns:
        Row count and digest, both computed from the rows read back.

    Raises:
        PermanentError: the table cannot be published (naming sample and column), or the queue
            holds something else than what was put.
        TransientError: the queue did not answer.
    """
    from relax_infer.transfer.rows import rows_of_table

    rows = await asyncio.to_thread(rows_of_table, table)
    return await _ask("publish", partition, rows, timeout=_SEVERAL_CALLS)


async def read_partition(partition: str) -> "PublishedRows":
    """Every row of a partition, sorted by (group, sample), read by this process from storage.

    Needs torch and TransferQueue in this process.

    Raises:
        PermanentError: the partition is incomplete.
        TransientError: there is no such partition, or the queue did not answer.
    """
    prepare_environment()
    connection = await _ask("connection", timeout=CALL_SECONDS)
    client = await client_of(connection, CALL_SECONDS)
    rows = await client.get(partition)
    if rows is None:
        raise TransientError(
            f"TransferQueue holds no partition {partition}.",
            cure="It was cleared, or lost with the queue; publish the step's scored.arrow again.",
        )
    return rows


async def clear_partition(partition: str) -> None:
    """Nothing of the partition is left. Idempotent.

    Raises:
        TransientError: the queue did not answer.
    """
    if await asyncio.to_thread(_find_owner) is None:
        return  # its rows died with it
    await _ask("clear", partition, timeout=_SEVERAL_CALLS)


async def list_partitions(run: str | None = None) -> list[str]:
    """Names of a run's partitions, or of all, in name order.

    Raises:
        TransientError: the queue did not answer.
    """
    names: list[str] = await _ask("partitions", timeout=2 * CALL_SECONDS)
    return sorted(n for n in names if run is None or n.startswith(f"{run}/train_"))


async def close_queue(run: str) -> None:
    """No partition of this run is left; the queue stays for other runs. Idempotent.

    Raises:
        TransientError: the queue did not answer.
    """
    if await asyncio.to_thread(_find_owner) is None:
        return
    for partition in await list_partitions(run):
        await clear_partition(partition)


async def stop_owner(timeout: float = 60.0) -> None:
    """End the queue with all its rows, and see every part gone. Idempotent.

    Raises:
        UnconfirmedError: a part was still there after ``timeout`` seconds.
    """
    import ray
    from ray.exceptions import RayError

    deadline = asyncio.get_running_loop().time() + timeout
    owner = await asyncio.to_thread(_find_owner)
    if owner is not None:
        # What it does not end dies with it, and is looked for below.
        with contextlib.suppress(TimeoutError, RayError):
            await asyncio.wait_for(owner.close.remote(), timeout)
        await asyncio.to_thread(ray.kill, owner)
    while left := await asyncio.to_thread(_still_there):
        if asyncio.get_running_loop().time() > deadline:
            raise UnconfirmedError(
                f"Parts of TransferQueue are there {timeout:g} s after they were ended:"
                f" {', '.join(left)}.",
                cure="Look at `ray list actors`.",
            )
        await asyncio.sleep(_POLL)


def _still_there() -> list[str]:
    return [*queue_parts(), *([OWNER] if _find_owner() is not None else [])]


def _find_owner() -> Any | None:
    import ray

    try:
        return ray.get_actor(OWNER, namespace=NAMESPACE)
    except ValueError:
        return None


def _find_or_make_owner() -> Any:
    import ray

    return (
        ray.remote(QueueOwner)
        .options(
            name=OWNER,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=64,
            runtime_env={"env_vars": ENVIRONMENT},
        )
        .remote()
    )


async def _ask(method: str, *arguments: Any, timeout: float) -> Any:
    """One call of the owner, with a deadline."""
    from ray.exceptions import RayError

    owner = await asyncio.wait_for(asyncio.to_thread(_find_owner), CALL_SECONDS)
    if owner is None:
        raise TransientError(
            "TransferQueue is not open on this Ray cluster.",
            cure="Open it; if it was open before, its rows are lost: publish again.",
        )
    try:
        call = getattr(owner, method).remote(*arguments)
        return await asyncio.wait_for(_of_ray(call), timeout)
    except TimeoutError:
        raise TransientError(
            f"The owner of TransferQueue did not answer within {timeout:g} s ({method})."
        ) from None
    except RayError as error:
        raise TransientError(f"The owner of TransferQueue failed ({method}): {error}") from error


async def _of_ray(call: Awaitable[T]) -> T:
    """The answer; an error that the actor raised on purpose comes out as itself."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, RelaxError):
            raise error.cause from None
        raise
