"""The trainer group on a real Ray, from a real TransferQueue."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.training import TrainerSpec, TrainRequest
from relax_infer.placement import bind_pool, release_pool
from relax_infer.training import TrainerGroup, read_ledger
from relax_infer.transfer import open_queue, partition_name, publish, stop_owner
from tests.training.conftest import make_spec, operation
from tests.transfer.conftest import ray_address
from tests.transfer.tables import scored_table

__all__ = ["ray_address"]

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
async def placed(
    ray_address: str, tmp_path: Path, model_folder: Path
) -> AsyncIterator[TrainerSpec]:
    """A trainer's spec whose pool is bound; the queue is open."""
    await open_queue()
    bundles = await bind_pool("run", 1, 60.0)
    yield make_spec(tmp_path / "store", model_folder, bundles=tuple(bundles))
    await release_pool("run")
    await stop_owner()


async def published(spec: TrainerSpec, step: int, counter: int = 1) -> TrainRequest:
    table = scored_table(groups=32, samples=8, seed=step)
    result = await publish(partition_name(spec.run.run, step), table)
    return TrainRequest(
        trainer=spec,
        fence=FenceToken(counter=counter, grant_id="grant"),
        step=step,
        partition=result.partition,
        keys=result.keys,
        digest=result.digest,
    )


@pytest.mark.wide
async def test_steps_are_trained_once_through_the_death_of_the_actor_to_a_proved_stop(
    placed: TrainerSpec,
) -> None:
    spec = placed
    group = TrainerGroup(spec)
    assert not (await group.start()).resident
    assert (await group.onload(operation(spec, "on"))).status.resident

    first = await published(spec, 1)
    both = await asyncio.gather(group.train(first), TrainerGroup(spec).train(first))
    assert both[0] == both[1]
    assert not both[0].repeated
    assert (await group.train(first)).repeated

    pid = (await group.status()).actor_pid
    assert pid is not None
    dying = psutil.Process(pid)
    dying.kill()
    await _ended(dying)
    second = await group.train(await published(spec, 2))
    assert (second.step, second.repeated) == (2, False)
    status = await group.status()
    assert status.actor_pid != pid
    assert (status.step, status.resident) == (2, True)

    with pytest.raises(StaleFence):
        await group.offload(operation(spec, "late", counter=0))
    changed = (await published(spec, 3)).model_copy(update={"digest": "0" * 64})
    with pytest.raises(PermanentError, match="was committed with"):
        await group.train(changed)

    off = await group.offload(operation(spec, "off", counter=1))
    assert [e.proof for e in off.evidence] == ["simulated"]
    last = psutil.Process((await group.status()).actor_pid)
    stopped = await group.stop(operation(spec, "stop", counter=2))
    assert not stopped.status.resident
    assert [e.fence.counter for e in stopped.evidence] == [2]
    await _ended(last)
    assert [e.result.step for e in read_ledger(spec.run).entries] == [1, 2]


@pytest.fixture
async def two_placed(
    ray_address: str, tmp_path: Path, model_folder: Path
) -> AsyncIterator[TrainerSpec]:
    """A trainer of two data parallel ranks whose pool is bound; the queue is open."""
    await open_queue()
    bundles = await bind_pool("run", 2, 60.0)
    yield make_spec(tmp_path / "store", model_folder, bundles=tuple(bundles), ranks=2)
    await release_pool("run")
    await stop_owner()


@pytest.mark.wide
async def test_two_ranks_train_as_one_and_are_made_anew_when_one_dies(
    two_placed: TrainerSpec,
) -> None:
    spec = two_placed
    group = TrainerGroup(spec)
    assert (await group.onload(operation(spec, "on"))).status.resident
    first = await group.train(await published(spec, 1))
    assert (first.step, first.repeated) == (1, False)

    pid = (await group.status()).actor_pid
    assert pid is not None
    dying = psutil.Process(pid)
    dying.kill()
    await _ended(dying)
    second = await group.train(await published(spec, 2))
    assert (second.step, second.repeated) == (2, False)

    off = await group.offload(operation(spec, "off"))
    assert [(e.holder, e.proof) for e in off.evidence] == [
        ("trainer/rank-0", "simulated"),
        ("trainer/rank-1", "simulated"),
    ]
    stopped = await group.stop(operation(spec, "stop", counter=2))
    assert not stopped.status.resident
    assert len(stopped.evidence) == 2
    assert [e.result.step for e in read_ledger(spec.run).entries] == [1, 2]


async def _ended(process: psutil.Process) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process], 30)
    assert not alive
