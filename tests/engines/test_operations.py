"""Operations are carried out once, however often they are asked for."""

import asyncio

import pytest

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.engines.operations import OperationTable


class Work:
    def __init__(self, error: Exception | None = None) -> None:
        self.times, self.go, self.error = 0, asyncio.Event(), error

    async def __call__(self) -> int:
        self.times += 1
        await self.go.wait()
        if self.error:
            raise self.error
        return self.times


async def test_the_same_id_joins_what_runs_and_then_gets_the_recorded_result():
    table, work = OperationTable[int](), Work()
    asked = [asyncio.create_task(table.run("a", "onload", work)) for _ in range(3)]
    work.go.set()
    assert await asyncio.gather(*asked) == [1, 1, 1]
    assert await table.run("a", "onload", work) == 1
    assert await table.run("b", "onload", work) == 2


async def test_a_recorded_failure_is_given_again_and_not_tried_again():
    table, work = OperationTable[int](), Work(TransientError("no"))
    work.go.set()
    for _ in range(2):
        with pytest.raises(TransientError, match="no"):
            await table.run("a", "offload", work)
    assert work.times == 1


async def test_an_asker_that_goes_away_cancels_nothing():
    table, work = OperationTable[int](), Work()
    asked = asyncio.create_task(table.run("a", "onload", work))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    work.go.set()
    assert await table.run("a", "onload", work) == 1


async def test_an_id_is_not_used_for_two_kinds_of_operation():
    table, work = OperationTable[int](), Work()
    work.go.set()
    await table.run("a", "onload", work)
    with pytest.raises(PermanentError, match="known as onload, asked for as offload"):
        await table.run("a", "offload", work)


async def test_old_finished_operations_are_forgotten_and_running_ones_never():
    table, running, quick = OperationTable[int](keep=2), Work(), Work()
    quick.go.set()
    first = asyncio.create_task(table.run("running", "onload", running))
    await asyncio.sleep(0)
    for k in range(6):
        await table.run(f"quick-{k}", "onload", quick)
    again = asyncio.create_task(table.run("running", "onload", running))
    running.go.set()
    assert await asyncio.gather(first, again) == [1, 1]
    await table.run("quick-0", "onload", quick)
    assert quick.times == 7
