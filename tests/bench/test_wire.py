"""The load of the gateway's bench: every request is a request of its own."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from tests.bench.gateway import HERE, bodies
from tests.gateway.fakes import engine

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.mark.parametrize("size", ["small", "64 KB"])
async def test_no_two_requests_have_one_id_and_their_bodies_stay_whole(tmp_path: Path, size: str):
    wire, body = tmp_path / "wire", bodies(tmp_path)[size]
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-o", wire, HERE / "wire.c"], check=True)

    async def answer(request: web.Request, payload: object) -> web.Response:
        return web.json_response({})

    async with engine(answer) as upstream:
        port = upstream.url.rpartition(":")[2]
        ran = await asyncio.create_subprocess_exec(
            *(str(wire), "load", port, "/generate", "32", "0.3", str(body)),
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await ran.communicate()
    answers, bad = map(int, told.split()[:2])
    assert answers > 64
    assert bad == 0
    sent = [json.loads(raw) for _, raw in upstream.posts]
    assert len({payload.pop("rid") for payload in sent}) == len(sent) >= answers
    expected = json.loads(body.read_text())
    del expected["rid"]
    assert all(payload == expected for payload in sent)
