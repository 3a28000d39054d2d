import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from relax_infer.discovery import (
    InferenceClient,
    InferenceRoutingError,
    close_loop_inference_clients,
    generate_with_discovery,
)
from relax_infer.discovery.client import endpoint_url
from tests.discovery.servers import Provider, echo, sent
from tests.gateway.fakes import engine, gateway, registry, until

INF, NAN = float("inf"), float("nan")
PAYLOAD = {"text": "x", "model": "m", "route_key": "k", "n": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"discovery_url": "http://h", "snapshot_provider": Provider()},
        {"discovery_url": "file://h"},
        {"discovery_url": "http://h", "gateway_url": "h"},
        {"discovery_url": ""},
        {"discovery_url": "http://h?schema=2"},
        {"snapshot_provider": registry("genrm")},
        *({"discovery_url": "http://h", "timeout": t} for t in (0, -1, INF, NAN, True, "1", None)),
        *({"discovery_url": "http://h", "cache_ttl": t} for t in (-1, NAN, None, True, "1")),
        *({"discovery_url": "http://h", "max_connections": n} for n in (0, -1, True, 1.5, None)),
    ],
)
async def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        InferenceClient(**wrong)


@pytest.mark.parametrize(
    "path",
    ["x", "", "//host/x", "/x?q=1", "/x#f", "http://h/x", "/a b", "/x?", "/\\x", "/u:p@h/x"],
)
def test_a_path_cannot_lead_elsewhere(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        endpoint_url("http://h/teacher/", path)
    assert endpoint_url("http://h/teacher/", "/engines") == "http://h/teacher/engines"


async def test_a_direct_request_drops_both_selectors_and_leaves_the_payload_alone() -> None:
    async with engine(echo) as upstream:
        provider, given = Provider(upstream), dict(PAYLOAD)
        async with InferenceClient(snapshot_provider=provider) as client:
            assert await client.generate(given, affinity_key="g") == {"text": "ok"}
            assert sent(upstream) == {"text": "x", "n": 1}
            assert upstream.posts[0][0]["X-SMG-Routing-Key"] == "g"
            await client.generate(given, affinity_key="g", headers={"x-smg-routing-key": "own"})
            assert upstream.posts[1][0].getall("X-SMG-Routing-Key") == ["own"]
        assert given == PAYLOAD
        assert provider.reads == 1


async def test_through_a_gateway_the_resolved_model_is_named() -> None:
    async with engine(echo) as direct, engine(echo) as front:
        provider = Provider(direct)
        async with InferenceClient(
            snapshot_provider=provider, gateway_url=front.url + "/"
        ) as client:
            await client.generate({"text": "x", "route_key": "k"})
            assert sent(front) == {"text": "x", "model": "m"}
            await client.generate({"text": "x"}, model="alias")
            assert sent(front) == {"text": "x", "model": "m"}
        assert direct.posts == []


async def test_chat_through_the_real_gateway_keeps_model_and_affinity_to_the_engine() -> None:
    """Contract 3.4: the gateway is told the resolved id, the backend its own name for it."""
    given = {"messages": [], "route_key": "k", "rid": "r"}
    async with gateway() as front, engine(echo) as first, engine(echo) as second:
        front.publish("teacher", first.url, second.url, served_model_name="org/served")
        url = f"{front.url}/teacher"
        async with InferenceClient(discovery_url=url, gateway_url=url) as client:
            for _ in range(4):
                assert await client.chat(given, affinity_key="group") == {"text": "ok"}
            chunks = client.stream("/v1/chat/completions", given, affinity_key="group")
            assert b"".join([chunk async for chunk in chunks]) == b'{"text": "ok"}'
            await client.chat(given, affinity_key="g", headers={"x-smg-ROUTING-key": "group"})
    assert given == {"messages": [], "route_key": "k", "rid": "r"}
    asked, other = (first, second) if first.posts else (second, first)
    assert (len(asked.posts), other.posts) == (6, [])  # one key, one replica
    for headers, body in asked.posts:
        assert headers.getall("X-SMG-Routing-Key") == ["group"]
        assert json.loads(body) == {"messages": [], "model": "org/served", "rid": "r"}


async def test_chat_in_gateway_mode_names_the_resolved_model_and_no_route_key() -> None:
    async with engine(echo) as front:
        provider = Provider(front)  # no served name: that is the gateway's to know
        async with InferenceClient(snapshot_provider=provider, gateway_url=front.url) as client:
            await client.chat({"messages": [], "model": "alias", "route_key": "nobody"})
        assert sent(front) == {"messages": [], "model": "m"}


async def test_chat_names_what_the_backend_itself_answers_to() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream, served_model_name="served")
        async with InferenceClient(snapshot_provider=provider) as client:
            await client.chat({"messages": []}, model="m")
            assert sent(upstream) == {"messages": [], "model": "served"}
        async with InferenceClient(snapshot_provider=Provider(upstream)) as client:
            with pytest.raises(InferenceRoutingError, match="served model name") as caught:
                await client.chat({"messages": []}, model="m")
        assert caught.value.status_code == 503
        assert len(upstream.posts) == 1


async def test_a_sleeping_model_costs_two_reads_and_no_request() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream, state="SLEEPING")
        async with InferenceClient(snapshot_provider=provider) as client:
            with pytest.raises(InferenceRoutingError) as caught:
                await client.generate({"text": "x"})
        assert (caught.value.status_code, provider.reads, upstream.posts) == (503, 2, [])


async def test_a_model_that_woke_up_is_found_by_the_second_read() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream, state="SLEEPING")
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            await client.snapshot()
            provider.document = registry("genrm", upstream.url)
            assert await client.generate({"text": "x"}) == {"text": "ok"}
        assert provider.reads == 2


async def test_a_bad_request_is_raised_at_once() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider) as client:
            with pytest.raises(InferenceRoutingError) as caught:
                await client.generate({"text": "x"}, model="nobody")
        assert (caught.value.status_code, provider.reads, upstream.posts) == (400, 1, [])


async def test_the_cache_expires_and_a_failing_discovery_leaves_nothing_behind() -> None:
    now = 0.0
    provider = Provider()
    async with InferenceClient(
        snapshot_provider=provider, cache_ttl=1.0, clock=lambda: now
    ) as client:
        first = await client.snapshot()
        first["models"].clear()
        now = 0.9
        assert (await client.snapshot())["models"].keys() == {"m"}
        assert provider.reads == 1
        now, good = 1.0, provider.document
        provider.document = RuntimeError("down")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="down"):
                await client.snapshot()
        provider.document = good
        await client.snapshot()
        assert provider.reads == 4


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_an_error_status_is_raised_never_replayed_and_forgets_discovery(status: int) -> None:
    async def refuse(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "no"}, status=status, headers={"Retry-After": "5"})

    async with engine(refuse) as first, engine(refuse) as second:
        provider = Provider(first, second)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await client.generate({"text": "x"})
            assert caught.value.status == status
            assert caught.value.headers is not None
            assert caught.value.headers["Retry-After"] == "5"
            assert (len(first.posts), len(second.posts)) == (1, 0)
            await client.snapshot()
        assert provider.reads == 2


async def test_a_backend_that_hangs_up_is_not_asked_again() -> None:
    async def hang_up(request: web.Request, payload: dict[str, Any]) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with engine(hang_up) as first, engine(echo) as second:
        provider = Provider(first, second)
        async with InferenceClient(snapshot_provider=provider, cache_ttl=60) as client:
            with pytest.raises(aiohttp.ClientError):
                await client.generate({"text": "x"})
            assert (len(first.posts), len(second.posts)) == (1, 0)
            await client.snapshot()
        assert provider.reads == 2


async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def test_the_deadline_covers_discovery_and_request_and_hangs_up() -> None:
    async def slow() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with InferenceClient(snapshot_provider=slow, timeout=0.1) as client:
        with pytest.raises(TimeoutError):
            await client.generate({"text": "x"})
    async with engine(never) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider, timeout=0.2, cache_ttl=60) as client:
            with pytest.raises(TimeoutError):
                await client.generate({"text": "x", "rid": "r"})
            await until(lambda: upstream.closed == ["r"])
            await client.snapshot()
        assert (len(upstream.posts), provider.reads) == (1, 2)


async def chunks(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    answer = web.StreamResponse()
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    await answer.write(b"data: 1\r\n\r\n")
    if payload.get("hang"):
        await asyncio.Event().wait()
    await answer.write(b"data: [DONE]\r\n\r\n")
    return answer


async def test_a_stream_is_untouched_and_ends_at_the_deadline() -> None:
    async with engine(chunks) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider, timeout=0.5, cache_ttl=60) as client:
            whole = b"".join([c async for c in client.stream("/generate", {"stream": True})])
            assert whole == b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n"
            assert provider.reads == 1
            received: list[bytes] = []

            async def receive() -> None:
                async for chunk in client.stream("/generate", {"hang": True, "rid": "r"}):
                    received.append(chunk)  # noqa: PERF401

            with pytest.raises(TimeoutError):
                await receive()
            assert received == [b"data: 1\r\n\r\n"]
            await until(lambda: upstream.closed == ["r"])
            await client.snapshot()
        assert (len(upstream.posts), provider.reads) == (2, 2)


async def test_a_stream_that_is_given_up_hangs_up() -> None:
    async with (
        engine(chunks) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream)) as client,
    ):
        stream = client.stream("/generate", {"hang": True, "rid": "r"})
        assert await anext(stream) == b"data: 1\r\n\r\n"
        await stream.aclose()
        await until(lambda: upstream.closed == ["r"])


async def test_discovery_over_http_keeps_the_roles_prefix_and_one_client_serves_the_loop() -> None:
    async with gateway() as front, engine(echo) as upstream:
        front.publish("teacher", upstream.url)
        url = f"{front.url}/teacher/"
        for _ in range(3):
            answer = await generate_with_discovery(
                url, {"text": "x"}, model="m", headers={"x-smg-ROUTING-key": "g"}
            )
            assert answer == {"text": "ok"}
        assert len(upstream.posts) == 3
        assert upstream.posts[0][0]["X-SMG-Routing-Key"] == "g"
        await close_loop_inference_clients()
        await close_loop_inference_clients()


async def test_discovery_that_is_not_there_is_raised() -> None:
    async with gateway() as front:
        async with InferenceClient(discovery_url=f"{front.url}/teacher") as client:
            with pytest.raises(aiohttp.ClientResponseError) as caught:
                await client.generate({"text": "x"})
        assert caught.value.status == 503


async def test_as_many_requests_are_in_flight_as_connections_were_asked_for() -> None:
    everyone, count = asyncio.Event(), 120

    async def wait_for_all(request: web.Request, payload: dict[str, Any]) -> web.Response:
        if len(upstream.posts) == count:
            everyone.set()
        await everyone.wait()
        return web.json_response({})

    async with (
        engine(wait_for_all) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream), max_connections=count) as client,
    ):
        async with asyncio.timeout(20):
            await asyncio.gather(*(client.generate({"text": str(n)}) for n in range(count)))
    assert len(upstream.posts) == count


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
async def test_both_chat_paths_reach_a_router_that_nobody_manages(path: str) -> None:
    """Finding F2, the client's part: an external router, a fixed snapshot, nothing to discover."""
    async with engine(chunks) as router:
        fixed = registry("rollout", served_model_name="policy", route_mode="SGLANG_ROUTER",
                         router_url=router.url)  # fmt: skip

        async def provide() -> dict[str, Any]:
            return fixed

        async with InferenceClient(snapshot_provider=provide) as client:
            stream = client.stream(path, {"messages": [], "stream": True})
            assert b"".join([c async for c in stream]).endswith(b"[DONE]\r\n\r\n")
            assert sent(router) == {"messages": [], "stream": True, "model": "policy"}
    async with engine(echo) as router:
        fixed["models"]["m"]["router_url"] = router.url
        async with InferenceClient(snapshot_provider=provide) as client:
            assert await client.chat({"messages": []}) == {"text": "ok"}
        assert sent(router) == {"messages": [], "model": "policy"}


async def test_a_router_hears_of_the_affinity_and_picks_the_replica_itself() -> None:
    async with engine(echo) as router, engine(echo) as worker:
        provider = Provider(worker, route_mode="SGLANG_ROUTER", router_url=router.url)
        async with InferenceClient(snapshot_provider=provider) as client:
            await client.generate({"text": "x"}, affinity_key="group-7")
        assert router.posts[0][0]["X-SMG-Routing-Key"] == "group-7"
        assert worker.posts == []


async def test_a_header_of_any_case_is_the_affinity() -> None:
    async with engine(echo) as one, engine(echo) as other:
        provider = Provider(one, other, state="READY")
        provider.document["routing"]["policy"] = "affinity"
        async with InferenceClient(snapshot_provider=provider) as client:
            for name in ("X-SMG-Routing-Key", "x-smg-routing-key", "X-SMG-ROUTING-KEY"):
                await client.generate({"text": "x"}, headers={name: "k"})
            with pytest.raises(InferenceRoutingError) as caught:
                await client.generate({"text": "x"})
        assert caught.value.status_code == 400
        assert sorted((len(one.posts), len(other.posts))) == [0, 3]
