"""How a client reads discovery: over HTTP, conditionally, and once for everybody who waits."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relax_infer.discovery import (
    InferenceClient,
    InferenceRegistry,
    InferenceRoutingError,
    RoleSnapshot,
    _sources,
    close_loop_inference_clients,
    generate_with_discovery,
)
from tests.discovery.servers import Provider, Say, discovery, echo, raw_server
from tests.gateway.fakes import engine, gateway, registry, until


async def test_the_roles_prefix_is_kept_and_the_schema_named() -> None:
    async with discovery() as role:
        for url in (role.role_url, role.role_url + "/"):
            async with InferenceClient(discovery_url=url) as client:
                assert await client.snapshot() == role.registry.snapshot()
        assert role.seen == [("/run/teacher/engines?schema=2", None)] * 2


async def test_a_poller_takes_304_for_the_document_that_it_has() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream)
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=0) as client:
            first = await client.snapshot()
            assert await client.snapshot() == first
            assert await client.generate({"text": "x"}) == {"text": "ok"}
            assert [tag for _, tag in role.seen] == [None, '"epoch-1-1"', '"epoch-1-1"']
            assert role.statuses == [200, 304, 304]
            role.publish(upstream, state="SLEEPING")
            assert (await client.snapshot())["models"]["m"]["state"] == "SLEEPING"
            await client.snapshot()
            assert role.statuses[3:] == [200, 304]


async def test_a_registry_that_started_again_at_the_same_revision_is_read_in_full() -> None:
    """Pain 22, the caller's part: revisions of two epochs are not compared."""
    async with discovery() as role, engine(echo) as old, engine(echo) as new:
        role.publish(old)
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=0) as client:
            await client.generate({"text": "x"})
            role.registry = InferenceRegistry("teacher", "epoch-2")
            role.publish(new)
            await client.generate({"text": "x"})
        assert role.statuses == [200, 200]
        assert (len(old.posts), len(new.posts)) == (1, 1)


async def test_a_discovery_without_tags_is_read_in_full() -> None:
    async with discovery() as role:
        role.tags = False
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=0) as client:
            for _ in range(2):
                await client.snapshot()
        assert [tag for _, tag in role.seen] == [None, None]


async def test_after_a_failed_read_nothing_is_known_that_a_304_could_confirm() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream)
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=0) as client:
            await client.snapshot()
            role.status = 500
            for _ in range(2):
                with pytest.raises(aiohttp.ClientResponseError):
                    await client.generate({"text": "x"})
            assert upstream.posts == []
            role.status = 200
            await client.snapshot()
        assert [tag for _, tag in role.seen] == [None, '"epoch-1-1"', None, None]


@pytest.mark.parametrize("status", [304, 307, 404, 503])
async def test_a_discovery_that_is_no_success_is_raised(status: int) -> None:
    async with discovery() as role:
        role.status = status
        async with InferenceClient(discovery_url=role.role_url) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await client.generate({"text": "x"})
        assert (caught.value.status, role.reads) == (status, 1)


@pytest.mark.parametrize("text", ["", "[]", "<html>", '{"schema_version": 1}', "\x00"])
async def test_what_is_no_schema_2_document_is_503_and_read_twice(text: str) -> None:
    async with discovery() as role:
        role.text = text
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=60) as client:
            with pytest.raises(
                InferenceRoutingError, match="Invalid inference discovery"
            ) as caught:
                await client.generate({"text": "x"})
            assert (caught.value.status_code, role.reads) == (503, 2)
            with pytest.raises(InferenceRoutingError, match="Invalid inference discovery"):
                await client.snapshot()
            role.text = None
            assert await client.snapshot() == role.registry.snapshot()


async def test_a_provider_may_give_a_snapshot_and_change_its_document_later() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream)
        frozen = RoleSnapshot.from_dict(provider.document)

        async def give() -> RoleSnapshot:
            return frozen

        async with InferenceClient(snapshot_provider=give) as client:
            assert await client.snapshot() == provider.document
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            before = await client.snapshot()
            provider.document["models"]["m"]["engines"].clear()
            assert await client.snapshot() == before
            assert await client.generate({"text": "x"}) == {"text": "ok"}


async def test_a_thousand_callers_cause_one_read_per_time_to_live() -> None:
    now = 0.0
    provider = Provider()
    async with InferenceClient(snapshot_provider=provider, clock=lambda: now) as client:

        async def read_by_all() -> None:
            provider.go.clear()
            reads = provider.reads
            callers = [asyncio.create_task(client.snapshot()) for _ in range(1000)]
            await until(lambda: provider.reads > reads)
            provider.go.set()
            documents = await asyncio.gather(*callers)
            assert all(d == documents[0] for d in documents)
            assert provider.reads == reads + 1

        await read_by_all()
        now = 0.999
        await asyncio.gather(*(client.snapshot() for _ in range(1000)))
        assert provider.reads == 1
        now = 1.0
        await read_by_all()


async def test_a_thousand_requests_for_a_sleeping_model_are_three_reads_and_no_post() -> None:
    async with discovery() as role, engine(echo) as upstream:
        role.publish(upstream, state="SLEEPING")
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=60) as client:
            answers = await asyncio.gather(
                *(client.generate({"text": "x"}) for _ in range(1000)), return_exceptions=True
            )
        assert {str(a) for a in answers} == {"Model 'm' is SLEEPING"}
        assert role.reads <= 3
        assert upstream.posts == []


async def test_callers_that_wait_for_a_read_that_fails_share_its_error() -> None:
    provider = Provider()
    provider.document = RuntimeError("down")
    provider.go.clear()
    async with InferenceClient(snapshot_provider=provider) as client:
        callers = [asyncio.create_task(client.snapshot()) for _ in range(100)]
        await until(lambda: provider.reads == 1)
        provider.go.set()
        answers = await asyncio.gather(*callers, return_exceptions=True)
    assert {str(a) for a in answers} == {"down"}
    assert provider.reads == 1


async def test_a_caller_that_gives_up_leaves_the_others_their_read() -> None:
    provider = Provider()
    provider.go.clear()
    async with InferenceClient(snapshot_provider=provider) as client:
        first, second = (asyncio.create_task(client.snapshot()) for _ in range(2))
        await until(lambda: provider.reads == 1)
        first.cancel()
        await until(lambda: provider.reads == 2)
        provider.go.set()
        assert await second == provider.document


async def silent(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
    """Takes the request and says nothing."""


async def begun(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{")


@pytest.mark.parametrize("say", [silent, begun])
async def test_a_dead_connection_to_discovery_holds_nobody_up_for_longer_than_one_read(
    monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.setattr(_sources, "READ_SECONDS", 0.3)
    async with raw_server(say) as server:
        async with InferenceClient(discovery_url=f"{server.url}/teacher", timeout=600) as client:
            asking = [client.generate({"text": "x"}), client.snapshot(), client.snapshot(True)]
            errors = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 30)
        for error in errors:
            assert isinstance(error, aiohttp.ServerTimeoutError)
            assert "/teacher/engines did not answer within 0.3 s" in str(error)


async def test_a_snapshot_is_under_the_clients_timeout() -> None:
    provider = Provider()
    provider.go.clear()
    async with InferenceClient(snapshot_provider=provider, timeout=0.2) as client:
        for refresh in (False, True):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.snapshot(refresh), 30)
        provider.go.set()
        assert await client.snapshot() == provider.document


async def test_without_a_cache_every_caller_gets_a_read_that_began_after_it_asked() -> None:
    provider = Provider()
    provider.go.clear()
    async with InferenceClient(snapshot_provider=provider, cache_ttl=0) as client:
        early = asyncio.create_task(client.snapshot())
        await until(lambda: provider.reads == 1)
        late = [asyncio.create_task(client.snapshot()) for _ in range(5)]
        await asyncio.sleep(0)
        old, provider.document = provider.document, registry("genrm", "http://new:1")
        provider.go.set()
        assert await early == old
        assert all(d == provider.document for d in await asyncio.gather(*late))
        assert provider.reads == 2


async def test_a_refresh_is_read_after_the_call() -> None:
    provider = Provider()
    async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
        await client.snapshot()
        await client.snapshot(refresh=True)
        assert provider.reads == 2
        await client.snapshot()
        assert provider.reads == 2


async def test_a_refresh_that_fails_leaves_nothing_that_was_known_before() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            await client.generate({"text": "x"})
            provider.document = RuntimeError("down")
            with pytest.raises(RuntimeError, match="down"):
                await client.snapshot(refresh=True)
            with pytest.raises(RuntimeError, match="down"):
                await client.generate({"text": "x"})
        assert (provider.reads, len(upstream.posts)) == (3, 1)


async def test_a_304_that_nobody_asked_for_confirms_nothing() -> None:
    async with discovery() as role:
        role.tags = False
        async with InferenceClient(discovery_url=role.role_url, cache_ttl=0) as client:
            await client.snapshot()
            role.status = 304
            with pytest.raises(aiohttp.ClientResponseError):
                await client.snapshot()


async def test_a_read_under_way_when_a_request_failed_serves_nobody_later() -> None:
    now = 0.0

    async with engine(echo) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider, clock=lambda: now) as client:
            hanging = asyncio.create_task(never_answered(client))
            await until(lambda: provider.reads == 1 and len(upstream.posts) == 1)
            now = 1.0
            provider.go.clear()
            reader = asyncio.create_task(client.snapshot())
            await until(lambda: provider.reads == 2)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            provider.go.set()
            await reader
            await client.snapshot()
        assert provider.reads == 3


async def never_answered(client: InferenceClient) -> None:
    async for _ in client.stream("/generate", {"text": "x"}):
        await asyncio.Event().wait()


async def test_a_teacher_that_moves_is_followed_and_its_discovery_read_seldom() -> None:
    """Pain 15: an address from the start of the run would be dead after the teacher's restart."""
    async with discovery() as role, engine(echo) as old, engine(echo) as new:
        role.publish(old)
        for n in range(20):
            await generate_with_discovery(role.role_url, {"text": str(n)}, model="m")
        assert (len(old.posts), role.reads) == (20, 1)
        role.publish(new)
        await asyncio.sleep(1.05)  # the time to live
        for n in range(20):
            await generate_with_discovery(role.role_url, {"text": str(n)}, model="m")
        assert (len(old.posts), len(new.posts), role.reads) == (20, 20, 2)
        await close_loop_inference_clients()


async def test_a_replica_that_still_loads_its_weights_gets_no_request() -> None:
    """Pain 1: it was registered before its weights were those of the others."""
    async with engine(echo) as ready, engine(echo) as loading:
        document = registry("rollout", ready.url, loading.url)
        document["models"]["m"]["engines"][1]["state"] = "ONLOADING"
        provider = Provider()
        provider.document = document
        async with InferenceClient(snapshot_provider=provider) as client:
            for n in range(10):
                await client.generate({"text": "x"}, affinity_key=str(n) if n % 2 else None)
        assert (len(ready.posts), len(loading.posts)) == (10, 0)


async def test_through_the_real_gateway_a_guards_retry_after_reaches_the_caller() -> None:
    """Finding: the gateway dropped the Retry-After of a closed gate's 503."""

    async def closed(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "x"}, status=503, headers={"Retry-After": "7"})

    async with gateway() as front, engine(closed) as upstream:
        front.publish("genrm", upstream.url)
        url = f"{front.url}/genrm"
        async with InferenceClient(discovery_url=url, gateway_url=url) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await client.generate({"text": "x"})
    assert caught.value.status == 503
    assert caught.value.headers is not None
    assert caught.value.headers["Retry-After"] == "7"
    assert len(upstream.posts) == 1
