"""TransferQueue: the data plane between the scored batch and the trainer.

A *partition* is one step's table, named ``<run>/train_<step>``; its rows are samples under keys
``<group>/<sample>``. A detached Ray actor owns the queue, so rows outlive every worker. Callers of
``publish`` need neither torch nor TransferQueue; importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.transfer.owner import QueueDescription
    from relax_infer.transfer.queue import (
        clear_partition,
        close_queue,
        list_partitions,
        open_queue,
        partition_name,
        publish,
        read_partition,
        stop_owner,
    )
    from relax_infer.transfer.rows import PublishedRows, Ragged, rows_digest, rows_of_table

_HOME = {
    "PublishedRows": "rows",
    "QueueDescription": "owner",
    "Ragged": "rows",
    "clear_partition": "queue",
    "close_queue": "queue",
    "list_partitions": "queue",
    "open_queue": "queue",
    "partition_name": "queue",
    "publish": "queue",
    "read_partition": "queue",
    "rows_digest": "rows",
    "rows_of_table": "rows",
    "stop_owner": "queue",
}

__all__ = [
    "PublishedRows",
    "QueueDescription",
    "Ragged",
    "clear_partition",
    "close_queue",
    "list_partitions",
    "open_queue",
    "partition_name",
    "publish",
    "read_partition",
    "rows_digest",
    "rows_of_table",
    "stop_owner",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
