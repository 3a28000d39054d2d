"""A POST that was tried is never sent again by the client, whatever became of it."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relax_infer.discovery import InferenceClient
from tests.discovery.servers import Provider, RawServer, echo, raw_server, whole
from tests.gateway.fakes import Engine, engine, registry, until


def provider_of(*upstreams: Engine | RawServer) -> Provider:
    provider = Provider()
    provider.document = registry("genrm", *(u.url for u in upstreams))
    return provider


@pytest.mark.parametrize("second", ["nothing", "half an answer", "no http"])
async def test_a_kept_connection_that_dies_under_a_request_is_no_reason_to_repeat(
    second: str,
) -> None:
    """Pain 2: the server had taken the request; sent again, it would have been generated twice."""

    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        if request == 1:
            writer.write(whole(b"{}"))
            return
        if second == "half an answer":
            writer.write(whole(b'{"text": "' + b"x" * 1000 + b'"}')[:-10])
        elif second == "no http":
            writer.write(b"?\r\n\r\n")
        await writer.drain()
        writer.close()

    async with raw_server(say) as one, raw_server(say) as other:
        provider = provider_of(one)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            assert await client.generate({"text": "1"}) == {}
            provider.document = registry("genrm", one.url, other.url)
            with pytest.raises(aiohttp.ClientError):
                await client.generate({"text": "2"})
            assert (one.connections, len(one.requests), other.requests) == (1, 2, [])
            assert provider.reads == 1
            await client.snapshot()
        assert provider.reads == 2


async def test_a_connection_that_the_server_hung_up_on_meanwhile_is_not_used() -> None:
    closed = asyncio.Event()

    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        writer.write(whole(b"{}"))
        if connection == 1:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            closed.set()

    async with raw_server(say) as server:
        async with InferenceClient(snapshot_provider=provider_of(server)) as client:
            await client.generate({"text": "1"})
            await closed.wait()
            await asyncio.sleep(0.05)  # the client's loop hears of it
            await client.generate({"text": "2"})
        assert (server.connections, len(server.requests)) == (2, 2)


async def test_a_backend_that_is_not_there_is_tried_once_and_forgotten() -> None:
    async with engine(echo) as gone:
        pass
    async with engine(echo) as other:
        provider = provider_of(gone, other)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.generate({"text": "x"})
            assert other.posts == []
            await client.snapshot()
        assert provider.reads == 2


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_a_redirect_is_an_error_and_not_followed(status: int) -> None:
    async def elsewhere(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.Response(status=status, headers={"Location": "/generate"})

    async with engine(elsewhere) as upstream:
        async with InferenceClient(snapshot_provider=Provider(upstream)) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await client.generate({"text": "x"})
        assert (caught.value.status, len(upstream.posts)) == (status, 1)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"\xff", b'"x"'])
async def test_an_answer_that_is_no_json_object_is_an_error(body: bytes) -> None:
    """Pains 9 and 10, the caller's part: a failure is raised, never an empty or zero answer."""

    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        writer.write(whole(body))

    async with raw_server(say) as server:
        provider = provider_of(server)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            with pytest.raises(ValueError):  # noqa: PT011
                await client.generate({"text": "x"})
            await client.snapshot()
        assert (len(server.requests), provider.reads) == (1, 2)


async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_a_request_that_is_cancelled_hangs_up_and_forgets() -> None:
    """Pain 19, the caller's part: the engine sees that nobody waits any more."""
    async with engine(never) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            asked = asyncio.create_task(client.generate({"text": "x", "rid": "r"}))
            await upstream.seen.wait()
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until(lambda: upstream.closed == ["r"])
            await client.snapshot()
        assert (len(upstream.posts), provider.reads) == (1, 2)


async def test_a_stream_that_breaks_off_is_raised_after_what_came() -> None:
    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n")
        await writer.drain()
        writer.close()

    async with raw_server(say) as one, raw_server(say) as other:
        provider = provider_of(one, other)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            received: list[bytes] = []

            async def receive() -> None:
                async for chunk in client.stream("/generate", {"stream": True}):
                    received.append(chunk)  # noqa: PERF401

            with pytest.raises(aiohttp.ClientPayloadError):
                await receive()
            assert received == [b"data:"]
            await client.snapshot()
        assert (len(one.requests), other.requests, provider.reads) == (1, [], 2)


async def test_an_error_status_before_a_stream_is_raised_without_a_chunk() -> None:
    async def refuse(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.Response(status=503, text="closed", headers={"Retry-After": "3"})

    async with engine(refuse) as upstream:
        async with InferenceClient(snapshot_provider=Provider(upstream)) as client:
            with pytest.raises(aiohttp.ClientResponseError, match="closed") as caught:
                await anext(client.stream("/generate", {"stream": True}))
        assert caught.value.headers is not None
        assert caught.value.headers["retry-after"] == "3"
        assert len(upstream.posts) == 1


async def test_a_stream_passes_any_bytes_on() -> None:
    parts = [b"data: {\xff\x00\r\n\r\n", "é".encode()[:1], "é".encode()[1:] + b"\n\r"]

    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with raw_server(say) as server:
        async with InferenceClient(snapshot_provider=provider_of(server)) as client:
            for _ in range(2):
                chunks = [c async for c in client.stream("/generate", {"stream": True})]
                assert b"".join(chunks) == b"".join(parts)
        assert server.connections == 1


async def test_a_reader_that_dawdles_does_not_outlive_the_deadline() -> None:
    async def steady(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 65536)

    async with engine(steady) as upstream:
        async with InferenceClient(snapshot_provider=Provider(upstream), timeout=1.0) as client:
            stream = client.stream("/generate", {"rid": "r"})
            assert await anext(stream)
            await asyncio.sleep(1.2)  # over the deadline, with the next chunk already there
            with pytest.raises(TimeoutError):
                await anext(stream)
            await until(lambda: upstream.closed == ["r"])
        assert len(upstream.posts) == 1


async def test_the_deadline_covers_a_discovery_that_does_not_answer() -> None:
    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        await asyncio.Event().wait()

    async with raw_server(say) as silent:
        async with InferenceClient(discovery_url=silent.url, timeout=0.2) as client:
            for ask in (client.generate, client.chat):
                with pytest.raises(TimeoutError):
                    await ask({"text": "x"}, model="m")
            with pytest.raises(TimeoutError):
                await anext(client.stream("/generate", {"text": "x"}))
        assert [r.split(b" ")[0] for r in silent.requests] == [b"GET"] * 3


async def test_another_path_than_generation_is_refused() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider) as client:
            with pytest.raises(ValueError, match="/chat/completions"):
                await anext(client.stream("/abort_request", {}))
        assert (provider.reads, upstream.posts) == (0, [])
