"""What must happen to requests: the gateway, the client and engines of real HTTP."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from relax_infer.discovery import InferenceClient, InferenceRoutingError
from tests.discovery.servers import Provider, echo
from tests.gateway.asking import ask, get
from tests.gateway.fakes import Gateway, engine, gateway, until

ROLES = ("rollout", "genrm", "teacher")
PAYLOAD = {"text": "x", "rid": "mine"}
REFUSED = {"SLEEPING", "DRAINING", "FAILED", "STARTING", "ONLOADING", "STOPPING"}


async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def hang_up(request: web.Request, payload: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def routed(role: str, url: str) -> dict[str, Any]:
    """Rollout goes through its router, the others to their engines."""
    return {"route_mode": "SGLANG_ROUTER", "router_url": url} if role == "rollout" else {}


def publish(front: Gateway, role: str, url: str, **changes: Any) -> None:
    front.publish(role, url, **routed(role, url), **changes)


@pytest.mark.parametrize("role", ROLES)
async def test_registry_unavailable(role: str) -> None:
    """The gateway lives and says so, is not ready, and sends callers away for the moment."""
    async with gateway() as front:
        assert (await get(f"{front.url}/healthz")).status == 200
        health = (await get(f"{front.url}/{role}/health?schema=2")).json
        assert health["gateway_alive"] is True
        assert (health["registry_available"], health["ready"]) == (False, False)
        for path in ("generate", "v1/chat/completions"):
            payload = {"messages": []} if "chat" in path else PAYLOAD
            reply = await ask("POST", f"{front.url}/{role}/{path}", payload)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("role", ROLES)
async def test_model_sleeping_draining_or_failed(role: str) -> None:
    async with gateway() as front, engine(echo) as upstream:
        for term, state in enumerate(sorted(REFUSED), 1):
            publish(front, role, upstream.url, term=term, state=state)
            reply = await ask("POST", f"{front.url}/{role}/generate", PAYLOAD)
            assert (state, reply.status, reply.headers["retry-after"]) == (state, 503, "1")
        assert (upstream.posts, upstream.gets) == ([], [])
        publish(front, role, upstream.url, term=99, state="READY")
        assert (await ask("POST", f"{front.url}/{role}/generate", PAYLOAD)).status == 200


@pytest.mark.parametrize("role", ROLES)
async def test_transport_failure_to_the_engine(role: str) -> None:
    """502, whether nobody listens or the engine hangs up; no other engine is asked instead."""
    async with engine(echo) as gone:
        pass
    async with gateway() as front, engine(hang_up) as upstream:
        for term, url in enumerate((gone.url, upstream.url), 1):
            publish(front, role, url, term=term)
            reply = await ask("POST", f"{front.url}/{role}/generate", PAYLOAD)
            assert (reply.status, reply.detail) == (502, "Inference backend is unavailable")
        assert len(upstream.posts) == 1


@pytest.mark.parametrize("role", ROLES)
async def test_request_deadline(role: str) -> None:
    """504, and the engine is told to end what it was doing."""
    async with gateway(timeout=0.3) as front, engine(never) as upstream:
        publish(front, role, upstream.url)
        reply = await ask("POST", f"{front.url}/{role}/generate", PAYLOAD)
        assert reply.status == 504
        await until(lambda: upstream.closed == ["mine"] and upstream.aborts == ["mine"])
        assert len(upstream.posts) == 1


@pytest.mark.parametrize("ending", ["deadline", "cancelled"])
async def test_post_timed_out_or_cancelled(ending: str) -> None:
    """What the client knew of addresses is dropped, and the POST is sent to nobody again."""
    async with engine(never) as one, engine(echo) as other:
        provider = Provider(one, other)
        timeout = 0.3 if ending == "deadline" else 60.0
        async with InferenceClient(
            snapshot_provider=provider, cache_ttl=3600, timeout=timeout
        ) as client:
            asked = asyncio.create_task(client.generate(PAYLOAD))
            await one.seen.wait()
            if ending == "cancelled":
                asked.cancel()
            with pytest.raises((TimeoutError, asyncio.CancelledError)):
                await asked
            await until(lambda: one.closed == ["mine"])
            assert (len(one.posts), other.posts, provider.reads) == (1, [], 1)
            await client.snapshot()
            assert provider.reads == 2
            await client.snapshot()
            assert provider.reads == 2


BAD: list[Any] = [
    b"{",
    b"[]",
    {"sampling_params": {}},
    {**PAYLOAD, "stream": "yes"},
    {**PAYLOAD, "model": "nobody"},
    {**PAYLOAD, "model": 3},
    {**PAYLOAD, "route_key": "nobody"},
]


@pytest.mark.parametrize("role", ROLES)
async def test_bad_payload_model_or_route_key(role: str) -> None:
    """400 with the reason, and no engine hears of it; a direct client raises the same status."""
    async with gateway() as front, engine(echo) as upstream:
        publish(front, role, upstream.url)
        for payload in BAD:
            reply = await ask("POST", f"{front.url}/{role}/generate", payload)
            assert (payload, reply.status) == (payload, 400)
            assert reply.detail
        assert upstream.posts == []


async def test_a_direct_client_refuses_a_bad_model_or_route_key_likewise() -> None:
    async with engine(echo) as upstream:
        provider = Provider(upstream)
        async with InferenceClient(snapshot_provider=provider) as client:
            for selector in ({"model": "nobody"}, {"route_key": "nobody"}):
                with pytest.raises(InferenceRoutingError) as refused:
                    await client.generate(PAYLOAD, **selector)
                assert refused.value.status_code == 400
        assert upstream.posts == []
