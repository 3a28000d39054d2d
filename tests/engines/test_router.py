"""Router and registry are brought together again whoever of the two was away; 202 is not active.

Each test runs against the double, and against the real sglang-router over the same fake engines.
"""

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from aiohttp import web

from relax_infer.contracts.failures import PermanentError, TransientError
from relax_infer.engines import RouterAdapter, router_command
from tests.engines.router_double import router_double
from tests.gateway.fakes import free_port

Routers = Callable[[int], AbstractAsyncContextManager[RouterAdapter]]

pytestmark = pytest.mark.timeout(300)


class Engine:
    """As much of one as a router looks at; it may be down, and comes back under its address."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._runner: web.AppRunner | None = None

    async def up(self) -> None:
        app = web.Application()
        for path in ("/health", "/server_info", "/get_server_info", "/model_info"):
            app.router.add_get(path, self._well)
        app.router.add_get("/get_model_info", self._well)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def down(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _well(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake", "served_model_name": "policy"})


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    made = [Engine() for _ in range(3)]
    for engine in made:
        await engine.up()
    yield made
    for engine in made:
        await engine.down()


@contextlib.asynccontextmanager
async def double(port: int) -> AsyncIterator[RouterAdapter]:
    async with router_double(port) as made:
        yield RouterAdapter(made.url, timeout=30)


@contextlib.asynccontextmanager
async def real(port: int) -> AsyncIterator[RouterAdapter]:
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *router_command(port, free_port()), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            adapter = RouterAdapter(f"http://127.0.0.1:{port}", timeout=60)
            async with asyncio.timeout(120):
                while not await answers(adapter):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            yield adapter
        finally:
            process.kill()  # as a crash would
            await process.wait()


async def answers(adapter: RouterAdapter) -> bool:
    try:
        return await adapter.workers() == {}
    except TransientError:
        return False


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.real)])
def routers(request: pytest.FixtureRequest) -> Routers:
    return double if request.param == "double" else real


def healthy(*engines: Engine) -> dict[str, bool]:
    return {engine.url: True for engine in engines}


async def test_a_worker_whose_addition_was_accepted_is_not_active_until_its_engine_answers(
    routers: Routers, engines: list[Engine]
) -> None:
    """pains 13: 202 is no readiness."""
    first, late, _ = engines
    await late.down()
    async with routers(free_port()) as router:
        setting = asyncio.create_task(router.set_workers([first.url, late.url]))
        async with asyncio.timeout(60):
            while first.url not in await router.workers():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert late.url not in await router.workers()
        assert not setting.done()
        await late.up()
        await setting
        assert await router.workers() == healthy(first, late)


async def test_a_worker_that_never_answers_is_told_and_the_others_stay(
    routers: Routers, engines: list[Engine]
) -> None:
    first, dead, _ = engines
    await dead.down()
    async with routers(free_port()) as router:
        await router.set_workers([first.url])
        with pytest.raises(TransientError, match=dead.url):
            await RouterAdapter(router.url, timeout=1.5).set_workers([first.url, dead.url])
        assert await router.workers() == healthy(first)


async def test_a_dead_worker_is_removed_without_its_help(
    routers: Routers, engines: list[Engine]
) -> None:
    """pains 12: to deregister does not depend on the engine."""
    first, second, _ = engines
    async with routers(free_port()) as router:
        await router.set_workers([first.url, second.url])
        await second.down()
        await router.set_workers([first.url])
        assert await router.workers() == healthy(first)


async def test_an_address_that_is_known_may_be_added_again_also_after_its_engine_was_away(
    routers: Routers, engines: list[Engine]
) -> None:
    first, second, _ = engines
    async with routers(free_port()) as router:
        await router.set_workers([first.url, second.url])
        await router.set_workers([second.url, f"{first.url}/"])  # another order and spelling
        await first.down()
        await router.set_workers([second.url])
        again = asyncio.create_task(router.set_workers([first.url, second.url]))
        await asyncio.sleep(0)
        await first.up()
        await again
        assert await router.workers() == healthy(first, second)


async def test_a_router_that_came_back_empty_is_given_what_the_registry_has(
    routers: Routers, engines: list[Engine]
) -> None:
    """pains 11."""
    wanted = [engine.url for engine in engines[:2]]
    port = free_port()
    async with routers(port) as router:
        await router.set_workers(wanted)
    async with routers(port) as router:
        assert await router.workers() == {}
        await router.set_workers(wanted)
        assert await router.workers() == healthy(*engines[:2])


async def test_a_registry_that_came_back_finds_a_router_with_others_and_makes_it_exact(
    routers: Routers, engines: list[Engine]
) -> None:
    """pains 11: the router holds stale workers across a restart."""
    first, second, third = engines
    async with routers(free_port()) as router:
        await router.set_workers([first.url, second.url])
        await first.down()
        await RouterAdapter(router.url, timeout=60).set_workers([second.url, third.url])
        assert await router.workers() == healthy(second, third)
        await router.set_workers([])
        assert await router.workers() == {}


async def test_workers_that_nobody_wants_are_let_go(
    routers: Routers, engines: list[Engine]
) -> None:
    """For instance one whose addition was given up before the router was done with it."""
    first, stray, _ = engines
    async with routers(free_port()) as router:
        await router.set_workers([first.url, stray.url])
        assert await router.drop_strays([f"{first.url}/"]) == {stray.url}
        async with asyncio.timeout(30):
            while await router.workers() != healthy(first):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await router.drop_strays([first.url]) == set()


async def test_what_is_as_it_should_be_is_asked_for_nothing(engines: list[Engine]) -> None:
    first, second, _ = engines
    async with router_double() as made:
        router = RouterAdapter(made.url, timeout=30)
        await router.set_workers([first.url, second.url])
        await router.set_workers([first.url, second.url])
        await router.set_workers([first.url])
        assert made.asked == [
            *(("POST", url) for url in sorted([first.url, second.url])),
            ("DELETE", second.url),
        ]


@pytest.mark.parametrize(
    ("status", "failure"), [(500, TransientError), (503, TransientError), (400, PermanentError)]
)
async def test_a_router_that_refuses_or_is_away_is_told_apart(
    status: int, failure: type[Exception]
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no")

    app = web.Application()
    app.router.add_route("*", "/workers", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    router = RouterAdapter(f"http://127.0.0.1:{port}")
    with pytest.raises(failure, match=str(status)):
        await router.set_workers([])
    await runner.cleanup()
    with pytest.raises(TransientError, match="GET"):
        await router.set_workers([])


async def test_engines_of_others_are_held_besides_and_hold_nothing_up(
    routers: Routers, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them that does not answer is waited for only so long; ours are held all the same."""
    monkeypatch.setattr("relax_infer.engines.router.OTHERS_SECONDS", 2.0)
    ours, other, dead = engines
    await dead.down()
    async with routers(free_port()) as router:
        await router.set_workers([ours.url], [other.url])
        assert await router.workers() == healthy(ours, other)
        await router.set_workers([ours.url], [other.url, dead.url])
        held = await router.workers()
        assert {url for url, well in held.items() if well} == {ours.url, other.url}
        await router.keep_only([ours.url])
        assert set(await router.workers()) <= {ours.url, dead.url}
        await router.set_workers([ours.url])
        assert await router.workers() == healthy(ours)


async def test_to_keep_only_some_adds_none_and_asks_none_whether_it_is_well(
    routers: Routers, engines: list[Engine]
) -> None:
    """Ours may sleep while those of others leave."""
    ours, other, absent = engines
    async with routers(free_port()) as router:
        await router.set_workers([ours.url, other.url])
        await ours.down()
        await router.keep_only([ours.url, absent.url])
        assert set(await router.workers()) == {ours.url}
