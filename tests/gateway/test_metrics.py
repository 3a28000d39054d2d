import asyncio
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.asking import ask, get
from tests.gateway.fakes import Gateway, engine, gateway, until
from tests.gateway.test_gateway import echo


async def samples(front: Gateway, path: str = "/metrics") -> dict[tuple[str, ...], float]:
    """Value by name and label values, role first."""
    answer = await get(front.url + path)
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (s.name, s.labels.pop("role"), *s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


async def test_requests_are_counted_by_role_route_and_status() -> None:
    async with gateway() as front, engine(echo) as upstream:
        front.publish("genrm", upstream.url)
        for payload in ({"text": "x"}, {"text": "x"}, {}):
            await ask("POST", f"{front.url}/genrm/generate", payload)
        await ask("POST", f"{front.url}/teacher/v1/chat/completions", {"messages": []})
        found = await samples(front)
        assert found["relax_gateway_requests_total", "genrm", "/generate", "200"] == 2
        assert found["relax_gateway_requests_total", "genrm", "/generate", "400"] == 1
        chat = ("relax_gateway_requests_total", "teacher", "/v1/chat/completions", "503")
        assert found[chat] == 1
        assert found["relax_gateway_request_seconds_count", "genrm", "/generate"] == 3
        assert found["relax_gateway_requests_in_flight", "genrm"] == 0
        assert found["relax_gateway_topology_revision", "genrm"] == 1
        assert found["relax_gateway_registry_term", "genrm"] == 1
        assert found["relax_gateway_model_ready", "genrm", "m"] == 1
        front.publish("genrm", upstream.url, term=2, state="SLEEPING")
        assert (await samples(front))["relax_gateway_model_ready", "genrm", "m"] == 0
        own = await samples(front, "/genrm/metrics")
        assert own["relax_gateway_requests_total", "genrm", "/generate", "200"] == 2
        assert {key[1] for key in own} == {"genrm"}


async def test_a_caller_that_leaves_is_counted_as_such() -> None:
    async def never(request: web.Request, payload: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with gateway() as front, engine(never) as upstream:
        front.publish("genrm", upstream.url)
        async with aiohttp.ClientSession() as session:
            url = f"{front.url}/genrm/generate"
            asked = asyncio.create_task(session.post(url, json={"text": "x", "rid": "r"}))
            await upstream.seen.wait()
            assert (await samples(front))["relax_gateway_requests_in_flight", "genrm"] == 1
            asked.cancel()
        await until(lambda: upstream.aborts == ["r"])
        found = await samples(front)
        assert found["relax_gateway_requests_total", "genrm", "/generate", "499"] == 1
        assert found["relax_gateway_aborts_total", "genrm"] == 1
        assert found["relax_gateway_requests_in_flight", "genrm"] == 0
