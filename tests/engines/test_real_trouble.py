"""A real engine whose replies get lost, come late, refuse or lie; that dies or hangs when asked.

The engine is real; what goes wrong is done to its processes, or to its answers on their way.
"""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines import host_processes
from relax_infer.engines.control import EngineControl
from relax_infer.engines.memory import NodeUse
from relax_infer.engines.node import EngineNode
from relax_infer.machines import ReplicaState
from tests.engines.test_real_engine import engine, generate, running, scheduler_of

__all__ = ["engine"]
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
Call = Callable[..., Any]


def on_the_way(monkeypatch: pytest.MonkeyPatch, path: str, harm: Callable[[Call], Call]) -> None:
    """Every call of one path goes through ``harm`` of the real call."""
    real = EngineControl._call

    async def call(self: EngineControl, method: str, asked: str, *rest: Any, **more: Any) -> Any:
        through = harm(real) if asked == path else real
        return await through(self, method, asked, *rest, **more)

    monkeypatch.setattr(EngineControl, "_call", call)


def cut_afterwards(real: Call) -> Call:
    async def call(*given: Any, **more: Any) -> Any:
        await real(*given, **more)
        raise UnconfirmedError("the connection was cut before the answer came")

    return call


def refused(real: Call) -> Call:
    async def call(*given: Any, **more: Any) -> Any:
        return 409, {"error": "not now"}

    return call


async def ends_by_proof(engine: Any, pids: tuple[int, ...]) -> None:
    """What the lifecycle does next: nothing is left, and the next onload starts another."""
    outcome = await engine.operate("stop")
    assert outcome.report.state is ReplicaState.DEAD
    assert outcome.evidence is not None
    assert outcome.evidence.proof == "process_gone"
    assert [pid for pid in pids if host_processes.process(pid) is not None] == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(cut_afterwards, "cut before the answer", id="done, and its answer lost"),
        pytest.param(refused, "not now", id="refused"),
    ],
)
async def test_a_release_without_its_answer_is_no_release(engine, monkeypatch, harm, said):
    """pains 3: whether the engine did it cannot be told; it is FAILED until it is proved gone."""
    await engine.ready(0)
    pids = (await engine.actor.describe()).pids
    on_the_way(monkeypatch, RELEASE, harm)
    outcome = await engine.operate("offload")
    assert outcome.report.state is ReplicaState.FAILED
    assert outcome.evidence is None
    assert (outcome.report.error or "").startswith("Unconfirmed: ")
    assert said in (outcome.report.error or "")
    control = await engine.control()
    assert (await control.status())["ready"] is False
    monkeypatch.undo()
    await ends_by_proof(engine, pids)


async def test_a_reply_that_is_later_than_its_asker_waits_is_there_when_asked_again(engine):
    url = await engine.ready(0)
    (slow,) = await running(engine, url, "slow")
    op = {"operation_id": "late", "fence": engine_token(engine)}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.operate("offload", **op), 0.01)
    outcome = await engine.operate("offload", **op)
    assert (outcome.report.state, outcome.report.error) == (ReplicaState.SLEEPING, None)
    assert outcome.evidence is not None
    assert outcome.evidence.fence == op["fence"]
    await asyncio.gather(slow, return_exceptions=True)


def engine_token(engine: Any) -> FenceToken:
    engine.counter += 1
    return FenceToken(counter=engine.counter, grant_id="late")


@pytest.mark.wide
async def test_an_engine_that_keeps_its_memory_has_not_let_go(engine, monkeypatch):
    """The probe of the device is a double here: a CPU cannot tell."""
    await engine.ready(0)
    pids = (await engine.actor.describe()).pids
    full = NodeUse(node=0, devices=1, at_launch=1 << 30, in_use=60 << 30)

    async def memory(self: EngineNode) -> NodeUse:
        return full

    monkeypatch.setattr(EngineNode, "memory", memory)
    outcome = await engine.operate("offload")
    assert outcome.report.state is ReplicaState.FAILED
    assert "acknowledged its release" in (outcome.report.error or "")
    monkeypatch.undo()
    await ends_by_proof(engine, pids)


@pytest.mark.wide
async def test_an_engine_that_dies_as_it_wakes_is_started_anew_by_the_next_onload(
    engine, monkeypatch
):
    """pains 4: resume may kill the process."""
    await engine.ready(0)
    await engine.operate("offload")
    before = await engine.actor.describe()
    scheduler = await scheduler_of(engine)

    def dies(real: Call) -> Call:
        async def call(*given: Any, **more: Any) -> Any:
            os.kill(scheduler, signal.SIGKILL)
            return await real(*given, **more | {"timeout": 5.0})

        return call

    on_the_way(monkeypatch, RESUME, dies)
    outcome = await engine.operate("onload", 0)
    assert outcome.report.state is ReplicaState.FAILED
    monkeypatch.undo()
    await engine.ready(0)
    after = await engine.actor.describe()
    assert after.incarnation not in (None, before.incarnation)
    assert [pid for pid in before.pids if host_processes.process(pid) is not None] == []


@pytest.mark.wide
async def test_a_request_that_never_ends_releases_nothing_and_ends_with_its_engine(engine):
    """pains 19, 20: the scheduler stands still with a request in it."""
    url = await engine.ready(0)
    (wedged,) = await running(engine, url, "wedged")
    pids = (await engine.actor.describe()).pids
    scheduler = await scheduler_of(engine)
    engine.spec = engine.spec.model_copy(update={"drain_timeout": 3.0})
    os.kill(scheduler, signal.SIGSTOP)
    try:
        # The spec of an actor is that of its last launch; its time limit is what counts here.
        engine.actor._replica.spec = engine.spec
        outcome = await engine.operate("offload")
        assert outcome.report.state is ReplicaState.FAILED
        assert "not drained in time" in (outcome.report.error or "")
        assert outcome.evidence is None
        await ends_by_proof(engine, pids)
    finally:
        engine.spec = engine.spec.model_copy(update={"drain_timeout": 120.0})
        await asyncio.gather(wedged, return_exceptions=True)
    url = await engine.ready(0)
    assert (await generate(url, "again", tokens=3))[0] == 200


@pytest.mark.wide
async def test_a_frozen_scheduler_with_nothing_in_it_costs_no_more_than_a_drain(engine):
    """Each call waits for what is left of the drain's time, and not for a minute of its own."""
    await engine.ready(0)
    pids = (await engine.actor.describe()).pids
    engine.spec = engine.spec.model_copy(update={"drain_timeout": 3.0})
    engine.actor._replica.spec = engine.spec
    os.kill(await scheduler_of(engine), signal.SIGSTOP)
    try:
        outcome = await engine.operate("offload")
        assert outcome.report.state is ReplicaState.FAILED
        assert re.search(r"no answer within [123](\.\d+)? s", outcome.report.error or "")
        await ends_by_proof(engine, pids)
    finally:
        engine.spec = engine.spec.model_copy(update={"drain_timeout": 120.0})
