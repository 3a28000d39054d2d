"""TransferQueue on a real Ray: who may die, and what remains."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relax_infer.contracts.failures import TransientError
from relax_infer.transfer import (
    clear_partition,
    close_queue,
    list_partitions,
    open_queue,
    partition_name,
    publish,
    read_partition,
    rows_digest,
    rows_of_table,
    stop_owner,
)
from relax_infer.transfer.owner import queue_parts
from tests.transfer.tables import scored_table

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

_ROOT = Path(__file__).parents[2]
_WORKER = """
import asyncio, os, signal, sys
import ray
from relax_infer.transfer import open_queue, publish
from relax_infer.transfer.owner import queue_parts
from tests.transfer.tables import scored_table

async def main():
    await open_queue()
    result = await publish("r/train_1", scored_table())
    print(result.digest, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

ray.init(address=sys.argv[1], namespace="relax", log_to_driver=False, logging_level="ERROR")
asyncio.run(main())
"""


async def test_rows_outlive_the_worker_that_opened_the_queue_and_put_them(
    ray_address: str,
) -> None:
    await stop_owner()
    died = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WORKER, ray_address],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    rows = await read_partition("r/train_1")
    assert rows_digest(rows) == died.stdout.strip() == rows_digest(rows_of_table(scored_table()))
    assert rows.keys == rows_of_table(scored_table()).keys
    before = await open_queue()
    again = await publish("r/train_1", scored_table())
    assert (again.keys, again.digest) == (len(rows), died.stdout.strip())
    assert await open_queue() == before


async def test_a_runs_partitions_are_its_own(ray_address: str) -> None:
    await open_queue()
    for run, step in (("a", 1), ("a", 2), ("ab", 1)):
        await publish(partition_name(run, step), scored_table(groups=2))
    assert await list_partitions("a") == ["a/train_1", "a/train_2"]
    await clear_partition("a/train_2")
    assert await list_partitions("a") == ["a/train_1"]
    await close_queue("a")
    assert await list_partitions("a") == []
    assert await list_partitions("ab") == ["ab/train_1"]
    with pytest.raises(TransientError, match="holds no partition a/train_1"):
        await read_partition("a/train_1")


async def test_a_queue_whose_controller_died_is_made_again_and_says_that_it_is_empty(
    ray_address: str,
) -> None:
    import ray

    first = await open_queue()
    await publish("r/train_1", scored_table())
    await read_partition("r/train_1")
    ray.kill(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    second = await open_queue()
    assert second.owner_pid == first.owner_pid
    assert second.incarnation != first.incarnation
    with pytest.raises(TransientError, match="holds no partition"):
        await read_partition("r/train_1")
    await publish("r/train_1", scored_table())
    assert len(await read_partition("r/train_1")) == 16


async def test_a_stopped_queue_is_gone_and_using_it_says_so(ray_address: str) -> None:
    await open_queue()
    await stop_owner()
    await stop_owner()
    assert queue_parts() == []
    with pytest.raises(TransientError, match="not open"):
        await publish("r/train_1", scored_table())
    await close_queue("r")
