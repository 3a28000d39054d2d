"""A closed stream is an aborted request, down to the engine; and a drain waits for the engine."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.control import EngineControl
from relax_infer.engines.drain import drain
from tests.engines.fake_engine import fenced_fake
from tests.gateway.fakes import gateway, until

NEXT = FenceToken(counter=2, grant_id="b")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_the_gateway_ends_its_request_in_the_engine(
    tmp_path: Path, stream: bool
) -> None:
    """Pain 19: behind gateway and fence, a request does not outlive its caller."""
    async with gateway() as front, fenced_fake(tmp_path) as (fenced, _):
        front.publish("teacher", fenced.url)
        async with aiohttp.ClientSession() as session:
            payload = {"text": "x", "rid": "mine", "stream": stream}
            asked = asyncio.create_task(session.post(f"{front.url}/teacher/generate", json=payload))
            await until(lambda: "mine" in fenced.engine.running)
            if stream:
                (await asked).close()
            else:
                asked.cancel()
            await until(lambda: not fenced.engine.running)
        assert "mine" in fenced.engine.aborted
        await until(lambda: fenced.fence.gate.inflight == 0)
        # The caller is gone, but nobody has looked at the engine yet.
        assert fenced.fence.gate.status()["backend_drained"] is False


async def test_a_drain_is_not_done_while_the_engine_still_has_what_a_caller_left(
    tmp_path: Path,
) -> None:
    """Pain 3: the HTTP request is over, the engine's is not."""
    async with gateway() as front, fenced_fake(tmp_path) as (fenced, _):
        fenced.engine.abort = lambda rid: None  # type: ignore[method-assign]
        front.publish("teacher", fenced.url)
        async with aiohttp.ClientSession() as session:
            payload = {"text": "x", "rid": "mine", "stream": True}
            answer = await session.post(f"{front.url}/teacher/generate", json=payload)
            assert await answer.content.read(7) == b"data: 1"
            answer.close()
        control = EngineControl(fenced.socket)
        with pytest.raises(UnconfirmedError, match="not drained in time"):
            await drain(control, NEXT, 0.5)
        assert "mine" in fenced.engine.running
        assert fenced.fence.gate.status()["backend_drained"] is False
        fenced.engine.running["mine"].set()
        await drain(control, NEXT, 10)
        assert fenced.fence.gate.status()["backend_drained"] is True


async def test_the_gateway_of_an_engine_that_closed_says_when_to_come_back(tmp_path: Path) -> None:
    async with gateway() as front, fenced_fake(tmp_path) as (fenced, session):
        front.publish("teacher", fenced.url)
        await EngineControl(fenced.socket).close(NEXT)
        for path in ("generate", "v1/chat/completions"):
            payload = {"text": "x"} if path == "generate" else {"messages": []}
            async with session.post(f"{front.url}/teacher/{path}", json=payload) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "1"
                assert await answer.json() == {"detail": "engine is not admitting requests"}
        assert fenced.engine.bodies == []
