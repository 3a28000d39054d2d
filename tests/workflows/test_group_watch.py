"""The watch of an engine group, without Temporal: what it makes of a loss at a bad time."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import workflows._group_mending as mending
from relax_infer.contracts.engines import ReplicaReport, WatchReport, WatchRequest
from relax_infer.machines import GroupEvent, GroupState, ReplicaState
from tests.workflows.scripted_world import plan
from workflows._group_book import GroupBook
from workflows.engine_lifecycle import EngineLifecycle

pytestmark = pytest.mark.asyncio
SPEC = plan("run").groups[1]


def report(state: ReplicaState) -> ReplicaReport:
    return ReplicaReport(
        replica=0, engine_id=SPEC.engine_id(0), state=state, incarnation="first", error=None
    )


async def wait_condition(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The group of a judge that is READY, with the answers of its watches in ``life.watches``."""
    made: Any = object.__new__(EngineLifecycle)
    made._book = GroupBook(SPEC)
    for event in (GroupEvent.LAUNCH_STARTED, GroupEvent.LAUNCHED, GroupEvent.OPENED):
        made._book.move(event)
    made._book.replicas[0] = report(ReplicaState.READY)
    made._turn, made._id = asyncio.Lock(), "group"
    made._told_with_answer, made.told, made.mended, made.watches = False, 0, [], []

    async def tell_role() -> None:
        made.told += 1

    async def mend(lost: list[ReplicaReport]) -> None:
        made.mended.append(lost)

    async def watch(request: WatchRequest, *, summary: str) -> WatchReport:
        if not made.watches:
            await asyncio.Event().wait()
        return await made.watches.pop(0)()

    async def sleep(seconds: float) -> None:
        return None

    made._tell_role, made._mend = tell_role, mend
    outside = SimpleNamespace(
        logger=logging.getLogger("watch"),
        wait_condition=wait_condition,
        sleep=sleep,
    )
    monkeypatch.setattr(mending, "workflow", outside)
    monkeypatch.setattr(mending, "WATCH_ENGINES", watch)
    return made


LOST = (report(ReplicaState.FAILED),)


async def test_a_loss_is_mended(life: Any):
    await life._lose(LOST, life._book.incarnations())
    assert life.mended == [LOST]


async def test_a_mend_that_a_worker_forgets_with_its_workflow_tells_nobody(life: Any):
    async def mend(lost: list[ReplicaReport]) -> None:
        await asyncio.Event().wait()

    life._mend = mend
    loses = life._lose(LOST, life._book.incarnations())
    loses.send(None)
    loses.close()  # as when it is evicted: there is no loop any more
    assert life.told == 0


async def test_a_loss_that_had_to_wait_until_its_group_sleeps_is_none(life: Any):
    await life._turn.acquire()
    loses = asyncio.create_task(life._lose(LOST, life._book.incarnations()))
    await asyncio.sleep(0)
    life._book.move(GroupEvent.DRAIN_STARTED)
    life._book.move(GroupEvent.RELEASE_CONFIRMED)
    life._turn.release()
    await loses
    assert life._book.state is GroupState.SLEEPING
    assert life.mended == []


async def test_a_loss_of_an_engine_that_was_replaced_meanwhile_is_none(life: Any):
    seen = life._book.incarnations()
    another = report(ReplicaState.READY).model_copy(update={"incarnation": "second"})
    life._book.replicas[0] = another
    await life._lose(LOST, seen)
    assert life.mended == []


async def test_whatever_goes_wrong_with_one_loss_the_next_is_noticed(life: Any):
    async def fails(lost: list[ReplicaReport]) -> None:
        life._mend = mend
        raise RuntimeError("a bug")

    async def lose() -> WatchReport:
        return WatchReport(lost=LOST)

    mend, life._mend = life._mend, fails
    life.watches = [lose, lose]
    watching = asyncio.create_task(life._watch())
    await asyncio.wait_for(wait_condition(lambda: life.mended or watching.done()), 10)
    watching.cancel()
    assert life.mended == [LOST]
