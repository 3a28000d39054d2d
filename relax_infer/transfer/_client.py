"""One process's own connection to TransferQueue.

The module-level API of TransferQueue keeps one client per process for ever and its ``close`` ends
the shared controller, so the client classes below it are used: a connection is bound to one
incarnation of the queue and to one event loop, and can be given up without harm to anyone else.
A call that hangs (a dead controller never answers) is cancelled at its deadline.
"""

import asyncio
import os
from collections.abc import Awaitable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from relax_infer.contracts.failures import TransientError
from relax_infer.transfer.rows import PublishedRows

T = TypeVar("T")

ENVIRONMENT = {
    # Seconds; a lost storage unit is asked three times.
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "8",
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_NUM_THREADS": "1",
}
"""Read by TransferQueue when it is imported."""


def prepare_environment() -> None:
    """To be called before anything imports TransferQueue, unpickling its objects included."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class Connection(NamedTuple):
    """Where the queue is."""

    incarnation: str
    """New each time the queue is made; its rows are those of this incarnation only."""
    config: Any
    """TransferQueue's own, with the addresses of controller and storage."""


class QueueClient:
    """Key-value calls on partitions, each with a deadline.

    Raises:
        TransientError: from every method: the queue did not answer in time, or failed.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        from transfer_queue.client import AsyncTransferQueueClient

        self.incarnation = connection.incarnation
        self._timeout = timeout
        config = connection.config
        backend = config.backend.storage_backend
        self._raw: Any = AsyncTransferQueueClient(
            client_id=f"relax-{os.getpid()}-{id(self):x}",
            controller_info=config.controller.zmq_info,
        )
        self._raw.initialize_storage_manager(backend, config.backend[backend])

    def close(self) -> None:
        self._raw.close()

    async def partitions(self) -> list[str]:
        return await self._answer("list partitions", self._raw.async_get_partition_list())

    async def keys(self, partition: str) -> list[str]:
        listed = await self._answer("list keys", self._raw.async_kv_list(partition))
        return list(listed.get(partition, {}))

    async def put(self, partition: str, rows: PublishedRows) -> None:
        """Write rows under their keys; the same keys again are overwritten."""
        from relax_infer.transfer._tensors import to_tensordict

        meta = await self._answer(
            "register keys",
            self._raw.async_kv_retrieve_meta(rows.keys, partition, create=True),
        )
        fields = to_tensordict(rows)
        await self._answer("put rows", self._raw.async_put(fields, meta))

    async def get(self, partition: str) -> PublishedRows | None:
        """Every row, sorted by (group, sample), every column; None: there is no such partition.

        Raises:
            PermanentError: rows of different columns, or none of ours.
        """
        from relax_infer.contracts.failures import PermanentError
        from relax_infer.transfer._tensors import from_tensordict, sorted_keys

        keys = sorted_keys(await self.keys(partition))
        if not keys:
            return None
        meta = await self._answer(
            "find rows", self._raw.async_kv_retrieve_meta(keys, partition, create=False)
        )
        if meta.size != len(keys) or not meta.is_ready:
            raise PermanentError(
                f"Partition {partition} is incomplete: not every one of its {len(keys)} keys has"
                " every column."
            )
        fields = await self._answer("read rows", self._raw.async_get_data(meta))
        return from_tensordict(fields, keys)

    async def clear(self, partition: str) -> None:
        """Nothing of the partition is left; one that never was is no error."""
        if partition in await self.partitions():
            await self._answer("clear", self._raw.async_clear_partition(partition))

    async def _answer(self, doing: str, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, self._timeout)
        except TimeoutError:
            raise TransientError(
                f"TransferQueue did not answer within {self._timeout:g} s ({doing}).",
                cure="Its controller or a storage unit may have died; opening the queue again"
                " makes a new, empty one.",
            ) from None
        except (RuntimeError, OSError, ValueError) as error:
            raise TransientError(f"TransferQueue could not {doing}: {error}") from error


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, QueueClient] = WeakKeyDictionary()


async def client_of(connection: Connection, timeout: float) -> QueueClient:
    """This loop's client; a new one if the queue was made again since."""
    loop = asyncio.get_running_loop()
    known = _CLIENTS.get(loop)
    if known is not None and known.incarnation == connection.incarnation:
        return known
    if known is not None:
        known.close()
    _CLIENTS[loop] = made = await asyncio.wait_for(
        asyncio.to_thread(QueueClient, connection, timeout), timeout
    )
    return made
