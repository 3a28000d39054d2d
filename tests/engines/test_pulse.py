"""An engine is silent only if it was asked and had time to answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.engines import pulse
from relax_infer.engines.pulse import ASK_AFTER, Pulse


class Engine:
    """An engine's control socket on a clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.last_sign = 1000.0
        self.hangs = self.deaf = False
        self.asked = 0
        self.control: Any = self

    async def status(self) -> dict[str, float]:
        if self.deaf:
            raise UnconfirmedError("the socket says nothing")
        return {"silent_for": self.now - self.last_sign}

    async def log_probs(self, prompt: object, seconds: float) -> list[float]:
        self.asked += 1
        if self.hangs:
            raise UnconfirmedError("no answer")
        self.last_sign = self.now
        return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


async def look(beat: Pulse, engine: Any, after: float, timeout: float = 60.0) -> float:
    engine.now += after
    silent = await beat.silence(engine, timeout)
    await asyncio.sleep(0)  # the question, if there is one, is put
    return silent


async def test_time_in_which_nobody_looked_does_not_count(engine: Engine):
    beat = Pulse()
    assert await look(beat, engine, 3600) <= ASK_AFTER
    assert engine.asked == 1
    assert await look(beat, engine, 1) == 1
    assert await look(beat, engine, 3600) <= ASK_AFTER
    assert engine.asked == 2


async def test_one_that_does_not_answer_when_asked_is_silent(engine: Engine):
    engine.hangs = True
    beat = Pulse()
    assert await look(beat, engine, 5) == 5
    assert engine.asked == 0
    assert await look(beat, engine, 15) == ASK_AFTER
    assert await look(beat, engine, ASK_AFTER) == ASK_AFTER
    assert await look(beat, engine, 1) == 31


async def test_one_whose_socket_is_deaf_is_silent_only_after_a_second_look(engine: Engine):
    engine.deaf = True
    beat = Pulse()
    assert await look(beat, engine, 100) == ASK_AFTER
    assert await look(beat, engine, ASK_AFTER + 1) == 111
    engine.deaf = False
    engine.last_sign = engine.now
    assert await look(beat, engine, 2) == 2


async def test_a_late_answer_ends_the_silence(engine: Engine):
    engine.hangs = True
    beat = Pulse()
    await look(beat, engine, 50)
    engine.hangs = False
    engine.last_sign = engine.now + 1
    assert await look(beat, engine, 4) == 3
    engine.hangs = True
    assert await look(beat, engine, 20) == ASK_AFTER
    assert await look(beat, engine, ASK_AFTER + 1) == 34


async def test_a_short_health_timeout_leaves_time_to_ask_and_to_answer(engine: Engine):
    beat = Pulse()
    assert await look(beat, engine, 100, timeout=4.0) == 2
    assert engine.asked == 1
    assert await look(beat, engine, 1, timeout=4.0) == 1
