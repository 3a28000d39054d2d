"""TransferQueue's own controller and storage as plain objects in this process: no Ray cluster."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.transfer import rows_digest, rows_of_table
from relax_infer.transfer._client import Connection, QueueClient, client_of, prepare_environment
from relax_infer.transfer.owner import QueueOwner
from tests.transfer.tables import scored_table


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    prepare_environment()
    from omegaconf import OmegaConf
    from transfer_queue import SequentialSampler
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    controller = _plain(TransferQueueController)(sampler=SequentialSampler(), polling_mode=True)
    settings = {"num_data_storage_units": 1, "total_storage_size": None}
    unit = _plain(SimpleStorageUnit)({**settings, "_run_id": "test"})
    config = OmegaConf.create(
        {
            "controller": {"zmq_info": controller.get_zmq_server_info()},
            "backend": {
                "storage_backend": "SimpleStorage",
                "SimpleStorage": {**settings, "zmq_info": {"unit": unit.get_zmq_server_info()}},
            },
        },
        flags={"allow_objects": True},
    )
    yield Connection("first", config)
    unit.shutdown()


def _plain(actor: Any) -> Any:
    return actor.__ray_metadata__.modified_class


@pytest.fixture
async def owner(connection: Connection) -> QueueOwner:
    """An owner whose queue is made already."""
    made = QueueOwner()
    made._client = await client_of(connection, 10.0)
    return made


async def test_rows_come_back_as_they_were_put(owner: QueueOwner) -> None:
    rows = rows_of_table(scored_table())
    result = await owner.publish("r/train_1", rows)
    assert (result.keys, result.digest) == (len(rows), rows_digest(rows))
    held = await owner._open.get("r/train_1")
    assert held is not None
    assert rows_digest(held) == result.digest


async def test_publishing_again_changes_nothing(owner: QueueOwner) -> None:
    rows = rows_of_table(scored_table())
    first = await owner.publish("r/train_2", rows)
    assert await owner.publish("r/train_2", rows) == first
    assert len(await owner._open.keys("r/train_2")) == len(rows)


@pytest.mark.parametrize("kept", [{"groups": 2}, {"teacher": False}])
async def test_left_overs_of_an_earlier_attempt_are_replaced(
    owner: QueueOwner, kept: dict[str, Any]
) -> None:
    await owner.publish("r/train_3", rows_of_table(scored_table()))
    rows = rows_of_table(scored_table(seed=1, **kept))
    result = await owner.publish("r/train_3", rows)
    assert (result.keys, result.digest) == (len(rows), rows_digest(rows))


async def test_keys_without_values_are_seen_as_incomplete_and_then_filled(
    owner: QueueOwner,
) -> None:
    """What a publisher leaves that is killed after it registered its keys."""
    rows = rows_of_table(scored_table())
    await owner._open._raw.async_kv_retrieve_meta(rows.keys, "r/train_4", create=True)
    with pytest.raises(PermanentError, match="incomplete"):
        await owner._open.get("r/train_4")
    assert (await owner.publish("r/train_4", rows)).keys == len(rows)


async def test_a_cleared_partition_is_gone_and_clearing_again_is_no_error(
    owner: QueueOwner,
) -> None:
    await owner.publish("r/train_5", rows_of_table(scored_table()))
    await owner.clear("r/train_5")
    await owner.clear("r/train_5")
    assert "r/train_5" not in await owner.partitions()
    assert await owner._open.get("r/train_5") is None


async def test_rows_that_come_back_changed_are_refused(
    owner: QueueOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, others = rows_of_table(scored_table()), rows_of_table(scored_table(seed=9))

    async def swapped(_: str) -> object:
        return others

    monkeypatch.setattr(owner._open, "get", swapped)
    with pytest.raises(PermanentError, match="does not hold what was put"):
        await owner.publish("r/train_6", rows)


async def test_a_queue_that_never_answers_is_a_transient_error(connection: Connection) -> None:
    client = QueueClient(connection, 0.05)

    async def silent(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    client._raw.async_get_partition_list = silent
    with pytest.raises(TransientError, match=r"did not answer within 0\.05 s"):
        await client.partitions()
    client.close()


async def test_a_queue_that_was_made_again_gets_a_new_client(connection: Connection) -> None:
    first = await client_of(connection, 10.0)
    assert await client_of(connection, 10.0) is first
    second = await client_of(connection._replace(incarnation="second"), 10.0)
    assert second is not first
    second.close()


async def test_a_queue_that_is_not_open_says_so() -> None:
    with pytest.raises(TransientError, match="not open"):
        await QueueOwner().publish("r/train_1", rows_of_table(scored_table()))
