"""GenRMClient: three attempts, 4xx never again, over real HTTP."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from relax_infer.compat import genrm_client
from relax_infer.compat.genrm_client import GenRMClient

Answer = Callable[[], web.StreamResponse]


class Judge:
    """Answers what the test says, in order, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        answer = self.answers.pop(0)
        if answer is HANG_UP:
            assert request.transport is not None
            request.transport.close()
        return answer()


def said(status: int, **document: Any) -> Answer:
    return lambda: web.json_response(document, status=status)


HANG_UP: Answer = web.Response
YES = said(200, response="yes")
ASK = [{"role": "user", "content": "right?"}]


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[Judge]:
    judge = Judge()
    app = web.Application()
    app.router.add_post("/genrm/generate", judge.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}/genrm"
    yield judge
    await runner.cleanup()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were slept, which take none."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(genrm_client.asyncio, "sleep", sleep)
    return slept


async def test_what_is_not_given_is_not_sent(judge: Judge):
    judge.answers = [YES, YES]
    async with GenRMClient(f"{judge.url}//") as client:
        assert await client.generate(ASK) == "yes"
        await client.generate(ASK, sampling_params={"top_p": 0.5}, route_key="math")
    assert judge.asked == [
        {"messages": ASK},
        {"messages": ASK, "sampling_params": {"top_p": 0.5}, "route_key": "math"},
    ]


async def test_as_many_questions_go_at_once_as_the_contract_says(judge: Judge):
    """Contract 4.9: a pool of 2048."""
    async with GenRMClient(judge.url) as client:
        assert client._session is not None
        assert client._session.connector is not None
        assert client._session.connector.limit == 2048


@pytest.mark.parametrize("trouble", [said(503), HANG_UP], ids=["5xx", "transport"])
async def test_trouble_is_asked_again_twice(judge: Judge, pauses: list[float], trouble: Answer):
    judge.answers = [trouble, trouble, YES]
    async with GenRMClient(judge.url) as client:
        assert await client.generate(ASK) == "yes"
    assert len(judge.asked) == 3
    assert [p for p in pauses if p > 0] == [0.5, 1.0]


async def test_the_third_failure_is_raised(judge: Judge):
    judge.answers = [said(500), said(502), said(503)]
    async with GenRMClient(judge.url) as client:
        with pytest.raises(aiohttp.ClientResponseError) as raised:
            await client.generate(ASK)
    assert raised.value.status == 503


async def test_a_refusal_is_not_asked_again(judge: Judge, pauses: list[float]):
    judge.answers = [said(400)]
    async with GenRMClient(judge.url) as client:
        with pytest.raises(aiohttp.ClientResponseError):
            await client.generate(ASK)
    assert len(judge.asked) == 1
    assert [p for p in pauses if p > 0] == []


async def test_an_answer_without_words_is_an_error(judge: Judge):
    judge.answers = [said(200, text="yes")]
    async with GenRMClient(judge.url) as client:
        with pytest.raises(ValueError, match="without a response"):
            await client.generate(ASK)


async def test_it_is_a_context_manager():
    with pytest.raises(RuntimeError, match="async with"):
        await GenRMClient("http://127.0.0.1:1/genrm").generate(ASK)
