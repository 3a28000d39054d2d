"""The detached actor that owns TransferQueue: one per Ray cluster, in namespace ``relax-transfer``.

TransferQueue's controller and storage live as long as the process that made them; here that is
this actor, which no worker's death touches. It also makes the calls of ``publish``, one partition
operation at a time, so that a worker killed in the middle of one leaves it finished, not half done.
"""

import asyncio
import os
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

from relax_infer.contracts.base import Message
from relax_infer.contracts.batch import PublishResult
from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.transfer._client import Connection, QueueClient
from relax_infer.transfer.rows import PublishedRows, rows_digest

T = TypeVar("T")

OWNER = "transfer-queue-owner"
NAMESPACE = "relax-transfer"
_CONTROLLER, _STORAGE_UNIT = "TransferQueueController", "TransferQueueStorageUnit#"
STORAGE_UNITS = 1
CALL_SECONDS = 30.0
"""For one call of TransferQueue."""
HEALTH_SECONDS = 5.0
START_SECONDS = 180.0


class QueueDescription(Message):
    """The queue as it is now."""

    incarnation: str
    """New each time the queue had to be made; rows of an earlier one are lost."""
    owner_pid: int


class QueueOwner:
    """Makes TransferQueue when first opened, and again (empty) when its parts have died."""

    def __init__(self) -> None:
        self._client: QueueClient | None = None
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()

    async def open(self) -> QueueDescription:
        """The queue answers. Idempotent; a broken one is replaced.

        Raises:
            TransientError: another controller is in the way, or the parts did not start in time.
        """
        async with self._opening:
            if not await self._healthy():
                await self._remove()
                await self._make()
        connection = await self.connection()
        return QueueDescription(incarnation=connection.incarnation, owner_pid=os.getpid())

    async def connection(self) -> Connection:
        """What another process needs to make a client of its own."""
        if self._connection is None:
            raise TransientError("TransferQueue is not open.", cure="Open it first.")
        return self._connection

    async def publish(self, partition: str, rows: PublishedRows) -> PublishResult:
        """Put rows under their keys and read them back.

        A partition that holds something else, from an earlier attempt with other rows, is replaced.

        Raises:
            PermanentError: what is read back is not what was put.
            TransientError: the queue does not answer.
        """
        wanted = rows_digest(rows)
        async with self._turn:
            for last in (False, True):
                await self._open.put(partition, rows)
                held = await self._held(partition, last)
                if held == wanted:
                    return PublishResult(partition=partition, keys=len(rows), digest=held)
                if not last:
                    await self._open.clear(partition)
        raise PermanentError(
            f"Partition {partition} does not hold what was put: digest {held}, put was {wanted}.",
            cure="TransferQueue changed the rows; nothing may be trained on them.",
        )

    async def clear(self, partition: str) -> None:
        async with self._turn:
            await self._open.clear(partition)

    async def partitions(self) -> list[str]:
        return await self._open.partitions()

    async def close(self) -> None:
        """End controller and storage; all rows are gone."""
        async with self._opening:
            await self._remove()

    @property
    def _open(self) -> QueueClient:
        if self._client is None:
            raise TransientError("TransferQueue is not open.", cure="Open it first.")
        return self._client

    async def _held(self, partition: str, last: bool) -> str:
        try:
            rows = await self._open.get(partition)
        except PermanentError as error:
            if last:
                raise
            return str(error)  # left-overs of an earlier attempt: replaced by the caller
        return "of nothing" if rows is None else rows_digest(rows)

    async def _healthy(self) -> bool:
        if self._client is None:
            return False
        try:
            await asyncio.wait_for(self._client.partitions(), HEALTH_SECONDS)
        except (TransientError, TimeoutError):
            return False
        return len(await asyncio.to_thread(queue_parts)) == 1 + STORAGE_UNITS

    async def _make(self) -> None:
        config = await _in_time(asyncio.to_thread(_init), START_SECONDS, "start")
        connection = Connection(uuid.uuid4().hex, config)
        self._client = await _in_time(
            asyncio.to_thread(QueueClient, connection, CALL_SECONDS), START_SECONDS, "connect"
        )
        self._connection = connection

    async def _remove(self) -> None:
        client, self._client, self._connection = self._client, None, None
        if client is not None:
            client.close()
        await _in_time(asyncio.to_thread(_close), START_SECONDS, "stop")


def queue_parts() -> list[str]:
    """Actors of TransferQueue that Ray knows, controller and storage units, in any namespace.

    Storage units are in the namespace of whichever job first opened the queue. Blocks for one call
    to Ray's control plane.
    """
    from ray.util import list_named_actors

    named: list[Any] = list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"]
        for actor in named
        if actor["name"] == _CONTROLLER or actor["name"].startswith(_STORAGE_UNIT)
    )


def _init() -> object:
    import transfer_queue
    from omegaconf import OmegaConf

    if queue_parts():
        raise TransientError(
            "This Ray cluster has a TransferQueue that is not ours: an earlier owner's is still"
            " ending, or another program made one.",
            cure="Try again; if it stays, end that program: TransferQueue allows one per cluster.",
        )
    return transfer_queue.init(
        OmegaConf.create(
            {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": STORAGE_UNITS}},
            },
            flags={"allow_objects": True},
        )
    )


def _close() -> None:
    import transfer_queue

    transfer_queue.close()


async def _in_time(call: Awaitable[T], seconds: float, doing: str) -> T:
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        raise TransientError(
            f"TransferQueue did not {doing} within {seconds:g} s.",
            cure="Its controller and storage unit need one Ray CPU each: look at `ray status`.",
        ) from None
