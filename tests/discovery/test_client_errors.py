"""Errors of routing and of the client arrive whole in another process."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import aiohttp
import cloudpickle
import pytest
import ray.exceptions
from aiohttp import web

from relax_infer.discovery import InferenceClient, InferenceRoutingError
from tests.discovery.servers import Provider, echo, raw_server
from tests.gateway.fakes import engine, registry


def by_ray(error: Exception) -> Exception:
    """As Ray carries what a task raised to its caller."""
    carried = ray.exceptions.RayTaskError("task", "its traceback", error).to_bytes()
    return ray.exceptions.RayError.from_bytes(carried).cause  # type: ignore[attr-defined]


WAYS: dict[str, Callable[[Exception], Exception]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "cloudpickle": lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
    "ray": by_ray,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("status", [400, 503])
def test_a_routing_error_keeps_status_arguments_and_text(way: str, status: int) -> None:
    """Finding: InferenceRoutingError lost its status on its way through Ray."""
    error = InferenceRoutingError(status, "why")
    again = WAYS[way](error)
    assert type(again) is InferenceRoutingError
    assert (again.status_code, again.message) == (status, "why")
    assert (again.args, str(again)) == ((status, "why"), "why")


def test_what_ray_raises_at_its_caller_is_a_routing_error_with_its_status() -> None:
    raised = ray.exceptions.RayTaskError("task", "tb", InferenceRoutingError(503, "why"))
    both = pickle.loads(pickle.dumps(raised)).as_instanceof_cause()
    assert isinstance(both, InferenceRoutingError)
    assert (both.status_code, both.message) == (503, "why")


@pytest.mark.parametrize("way", WAYS)
async def test_a_backends_error_status_keeps_its_retry_after(way: str) -> None:
    async def refuse(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "no"}, status=503, headers={"Retry-After": "5"})

    async with (
        engine(refuse) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream)) as client,
    ):
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await client.generate({"text": "x"})
    again = WAYS[way](caught.value)
    assert isinstance(again, aiohttp.ClientResponseError)
    assert (again.status, again.message) == (503, '{"detail": "no"}')
    assert again.headers is not None
    assert again.headers["retry-after"] == "5"
    assert str(again) == str(caught.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ["refused", "hung up", "no http", "timeout"])
async def test_whatever_else_goes_wrong_can_be_carried_too(way: str, fault: str) -> None:
    async def say(writer: asyncio.StreamWriter, connection: int, request: int) -> None:
        if fault == "timeout":
            await asyncio.Event().wait()
        if fault == "no http":
            writer.write(b"?\r\n\r\n")
            await writer.drain()
        writer.close()

    async with raw_server(say) as server:
        url = "http://127.0.0.1:1" if fault == "refused" else server.url
        provider = Provider()
        provider.document = registry("genrm", url)
        async with InferenceClient(snapshot_provider=provider, timeout=0.3) as client:
            with pytest.raises((aiohttp.ClientError, TimeoutError)) as caught:
                await client.generate({"text": "x"})
    if fault == "no http":  # and not a 400, which would blame the request
        assert isinstance(caught.value, aiohttp.ClientPayloadError)
    again = WAYS[way](caught.value)
    assert type(again) is type(caught.value)
    assert str(again) == str(caught.value)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (["text"], "payload must be a mapping, got list"),
        (None, "payload must be a mapping, got NoneType"),
        ({"text": "x", "stream": True}, "read it with client.stream"),
    ],
)
async def test_a_payload_that_cannot_be_asked_is_refused_before_anything_is_sent(
    payload: Any, says: str
) -> None:
    async with (
        engine(echo) as upstream,
        InferenceClient(snapshot_provider=(provider := Provider(upstream))) as client,
    ):
        with pytest.raises(ValueError, match=says):
            await client.generate(payload)
        assert (provider.reads, upstream.posts) == (0, [])


async def test_an_answer_that_is_no_json_says_who_gave_it_and_how_it_begins() -> None:
    async def page(request: web.Request, payload: dict[str, Any]) -> web.Response:
        return web.Response(text="<html>")

    async with (
        engine(page) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream)) as client,
    ):
        with pytest.raises(ValueError, match=r"/generate answered no JSON object: '<html>'"):
            await client.generate({"text": "x"})


async def test_a_client_of_another_event_loop_says_so_and_sends_nothing() -> None:
    async with (
        engine(echo) as upstream,
        InferenceClient(snapshot_provider=Provider(upstream)) as client,
    ):
        await client.generate({"text": "x"})

        def elsewhere() -> None:
            asyncio.run(client.generate({"text": "x"}))

        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await asyncio.to_thread(elsewhere)
        assert len(upstream.posts) == 1
