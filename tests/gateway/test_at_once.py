"""Finding F1: the pool's limit is the concurrency that was configured."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.gateway.fakes import engine, gateway, until

MANY = 200


@pytest.mark.parametrize("path", ["generate", "chat/completions"])
async def test_two_hundred_requests_are_at_the_backend_before_any_is_answered(path: str) -> None:
    inside, go = 0, asyncio.Event()

    async def hold(request: web.Request, payload: dict[str, Any]) -> web.Response:
        nonlocal inside
        inside += 1
        await go.wait()
        return web.json_response({})

    async with gateway(max_connections=MANY) as front, engine(hold) as upstream:
        front.publish("rollout", upstream.url)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one(n: int) -> int:
                payload = {"text": "x", "messages": []} if path != "generate" else {"text": "x"}
                url = f"{front.url}/rollout/{path}"
                async with session.post(url, json=payload | {"rid": f"r{n}"}) as answer:
                    return answer.status

            asked = [asyncio.create_task(one(n)) for n in range(MANY)]
            await until(lambda: inside == MANY, timeout=30)
            assert not any(task.done() for task in asked)
            go.set()
            assert await asyncio.gather(*asked) == [200] * MANY
