"""How many requests are in flight, and what those do that wait; one client per event loop."""

import asyncio
import gc
from typing import Any

import pytest
from aiohttp import web

from relax_infer.discovery import (
    InferenceClient,
    close_loop_inference_clients,
    generate_with_discovery,
)
from relax_infer.discovery._loops import _clients
from tests.discovery.servers import Provider, discovery, echo
from tests.gateway.fakes import engine, registry, until


async def test_the_shared_client_lets_all_of_a_rollouts_requests_in() -> None:
    """Finding F1: 120 requests with max_connections=120 are all at the backend at once."""
    everyone, count = asyncio.Event(), 120

    async def wait_for_all(request: web.Request, payload: dict[str, Any]) -> web.Response:
        if len(upstream.posts) == count:
            everyone.set()
        await everyone.wait()
        return web.json_response({})

    async with discovery() as role, engine(wait_for_all) as upstream:
        role.publish(upstream)
        async with asyncio.timeout(20):
            await asyncio.gather(
                *(
                    generate_with_discovery(role.role_url, {"text": str(n)}, max_connections=count)
                    for n in range(count)
                )
            )
        assert (len(upstream.posts), role.reads) == (count, 1)
        await close_loop_inference_clients()


async def test_no_more_requests_are_in_flight_than_were_asked_for() -> None:
    go, most, now = asyncio.Event(), 0, 0

    async def count(request: web.Request, payload: dict[str, Any]) -> web.Response:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1
        return web.json_response({})

    async with (
        engine(count) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream), max_connections=3) as client,
    ):
        asked = [asyncio.create_task(client.generate({"text": str(n)})) for n in range(9)]
        await until(lambda: len(upstream.posts) == 3)
        await asyncio.sleep(0.05)  # time for a fourth to come
        go.set()
        await asyncio.gather(*asked)
        assert (most, len(upstream.posts)) == (3, 9)


async def test_a_request_that_waited_for_its_turn_goes_where_discovery_points_then() -> None:
    go = asyncio.Event()

    async def slow(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await go.wait()
        return web.json_response({})

    async with engine(slow) as old, engine(echo) as new:
        provider = Provider(old)
        async with InferenceClient(
            snapshot_provider=provider, cache_ttl=0, max_connections=1
        ) as client:
            first = asyncio.create_task(client.generate({"text": "1"}))
            await old.seen.wait()
            second = asyncio.create_task(client.generate({"text": "2"}))
            await asyncio.sleep(0)
            provider.document = registry("genrm", new.url)
            go.set()
            await asyncio.gather(first, second)
        assert (len(old.posts), len(new.posts)) == (1, 1)


async def test_discovery_is_read_while_every_turn_is_taken() -> None:
    go = asyncio.Event()

    async def slow(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await go.wait()
        return web.json_response({})

    async with discovery() as role, engine(slow) as upstream:
        role.publish(upstream)
        async with InferenceClient(discovery_url=role.role_url, max_connections=1) as client:
            asked = asyncio.create_task(client.generate({"text": "x"}))
            await upstream.seen.wait()
            async with asyncio.timeout(5):
                await client.snapshot(refresh=True)
            go.set()
            await asked
        assert role.reads == 2


async def test_a_turn_comes_back_however_a_request_ends() -> None:
    async def hang(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"x")
        await asyncio.Event().wait()
        return answer

    async with engine(hang) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(
            snapshot_provider=provider, max_connections=1, timeout=0.5
        ) as client:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await client.generate({"text": "x"})
                with pytest.raises(TimeoutError):
                    _ = [chunk async for chunk in client.stream("/generate", {})]
                stream = client.stream("/generate", {})
                await anext(stream)
                with pytest.raises(TimeoutError):  # its turn does not come
                    await anext(client.stream("/generate", {}))
                await stream.aclose()
        assert len(upstream.posts) == 6


async def test_a_client_that_was_closed_may_be_used_again() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream)
        client = InferenceClient(discovery_url=role.role_url)
        for _ in range(2):
            assert await client.generate({"text": "x"}) == {"text": "ok"}
            await client.close()
            await client.close()
        assert len(upstream.posts) == 2


async def test_a_loop_has_one_client_per_address_and_settings() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream)
        for url in (role.role_url, role.role_url + "/"):
            await generate_with_discovery(url, {"text": "x"})
        assert role.reads == 1
        await generate_with_discovery(role.role_url, {"text": "x"}, timeout=5)
        await generate_with_discovery(role.role_url, {"text": "x"}, max_connections=7)
        assert (role.reads, len(upstream.posts)) == (3, 4)
        mine = _clients[asyncio.get_running_loop()]
        sessions = [client._session for client in mine.values()]
        assert len(sessions) == 3
        await close_loop_inference_clients()
        assert all(s is not None and s.closed for s in sessions)
        assert asyncio.get_running_loop() not in _clients
        await generate_with_discovery(role.role_url, {"text": "x"})
        assert role.reads == 4
        await close_loop_inference_clients()


@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning")
def test_clients_of_a_loop_that_has_ended_are_not_kept() -> None:
    async def ask(close: bool) -> None:
        async with discovery() as role, engine(echo) as upstream:
            role.publish(upstream)
            await generate_with_discovery(role.role_url, {"text": "x"})
            if close:
                await close_loop_inference_clients()

    asyncio.run(ask(close=False))
    assert len(_clients) == 1
    asyncio.run(ask(close=True))
    assert len(_clients) == 0
    gc.collect()
