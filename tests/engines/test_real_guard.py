"""A stock SGLang server that nobody of ours launched, and the guard before it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from relax_infer.engines.command import environment, server_settings
from relax_infer.engines.guard import EngineGuard
from tests.engines.checkpoints import group_spec, make_checkpoint
from tests.engines.fake_engine import TOKEN
from tests.engines.sglang_routes import CHANGING_PATHS
from tests.gateway.fakes import free_port

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = "only-the-guard-knows-it"
LONG = 6_000
"""Tokens: far longer than any wait here, were they computed to the end."""
ROOM = 8_192
KNOWN = {"authorization": f"Bearer {KEY}"}


@dataclass
class Behind:
    engine: str
    guard: EngineGuard

    async def left(self) -> int:
        """Requests that the engine itself says it works on."""
        async with (
            aiohttp.ClientSession(headers=KNOWN) as client,
            client.get(f"{self.engine}/v1/loads") as answer,
        ):
            loads = (await answer.json())["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def until_left(self, wanted: Any, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not wanted(await self.left()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def open(self) -> None:
        async with asyncio.timeout(30):
            while True:
                try:
                    await asyncio.to_thread(self.guard.open, TOKEN)
                except RuntimeError:
                    await asyncio.sleep(0.2)
                else:
                    return


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """As somebody else would, with a key."""
    folder = tmp_path_factory.mktemp("stock")
    make_checkpoint(folder / "version-0", seed=0, max_position_embeddings=ROOM)
    room = {"context-length": ROOM, "max-total-tokens": 4 * ROOM}
    spec, port = group_spec(folder, server_args=room), free_port()
    settings = server_settings(
        spec,
        host="127.0.0.1",
        port=port,
        dist_port=free_port(),
        model_path=spec.model_path,
        weight_version=0,
    )
    command = [sys.executable, "-m", "sglang.launch_server", "--api-key", KEY]
    for name, value in settings.items():
        if value is not None and value is not False:
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment(spec, "stock", ()), process_group=0
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def behind(launched: str) -> AsyncIterator[Behind]:
    async with asyncio.timeout(180), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(f"{launched}/health") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    made = EngineGuard(launched, key=KEY)
    await asyncio.to_thread(made.start)
    yield Behind(launched, made)
    await asyncio.to_thread(made.stop)


def payload(tokens: int = 3, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    sampling |= more.pop("sampling_params", {})
    return {"input_ids": [6, 2, 9, 3, 22], "sampling_params": sampling, **more}


async def generate(url: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{url}/generate", json=body) as answer,
    ):
        return answer.status, await answer.json()


async def test_nobody_gets_around_it_and_through_it_comes_what_the_engine_says(behind: Behind):
    assert (await generate(behind.guard.url, payload()))[0] == 503
    await behind.open()
    assert (await generate(behind.engine, payload()))[0] == 401
    _, direct = await generate(behind.engine, payload(), **KNOWN)
    status, answer = await generate(behind.guard.url, payload(rid="mine"))
    assert (status, answer["meta_info"]["id"]) == (200, "mine")
    assert answer["output_ids"] == direct["output_ids"]
    async with aiohttp.ClientSession(behind.guard.url) as client:
        for path in sorted(CHANGING_PATHS | {"/flush_cache", "/v1/loads"}):
            async with client.post(path, json={}) as refused:
                assert (path, refused.status) == (path, 404)
        async with client.get("/server_info") as info:
            assert info.status == 200
            assert {"host", "api_key"}.isdisjoint(await info.json())
        async with client.post("/generate", json=payload(stream=True)) as stream:
            assert stream.content_type == "text/event-stream"
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    assert (await asyncio.to_thread(behind.guard.status))["rids"] == []


LEAVING = {
    "one": {"rid": "one"},
    "no id": {},
    "a batch without ids": {"input_ids": [[6, 2], [9, 3]]},
    "a batch of one id": {"rid": "batch", "input_ids": [[6, 2], [9, 3], [22, 5]]},
    "samples": {"rid": "samples", "sampling_params": {"n": 2}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", LEAVING.values(), ids=LEAVING)
async def test_a_caller_that_leaves_ends_what_the_engine_made_of_its_request(
    behind: Behind, body: dict[str, Any], stream: bool
):
    await behind.open()
    async with aiohttp.ClientSession(behind.guard.url) as client:
        sent = payload(LONG, stream=stream, **body)
        asked = asyncio.create_task(client.post("/generate", json=sent))
        await behind.until_left(lambda left: left > 0, 30)
        if stream:
            answer = await asked
            assert await answer.content.readany()
            answer.close()
        else:
            asked.cancel()
        # SGLang looks every 4 s whether anybody waits for samples that were not to be streamed.
        await behind.until_left(lambda left: left == 0, 8 if body == LEAVING["samples"] else 2)


async def test_closing_ends_what_runs_and_drained_is_what_the_engine_says(behind: Behind):
    guard = behind.guard
    await behind.open()
    asked = asyncio.create_task(generate(guard.url, payload(LONG, rid="last")))
    await behind.until_left(lambda left: left > 0, 30)
    with pytest.raises(RuntimeError, match="the gate is open"):
        await asyncio.to_thread(guard.confirm_drained, TOKEN)
    await asyncio.to_thread(guard.close, TOKEN)
    assert (await generate(guard.url, payload()))[0] == 503
    status, answer = await asked
    assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert answer["meta_info"]["completion_tokens"] < LONG
    # Somebody who has the key goes around it: then it is the engine that says so.
    around = asyncio.create_task(generate(behind.engine, payload(900, rid="around"), **KNOWN))
    await behind.until_left(lambda left: left > 0, 30)
    with pytest.raises(RuntimeError, match="not idle"):
        await asyncio.to_thread(guard.confirm_drained, TOKEN)
    assert (await asyncio.to_thread(guard.status))["backend_drained"] is False
    assert (await around)[1]["meta_info"]["finish_reason"]["type"] == "length"
    async with asyncio.timeout(30):
        while not (await asyncio.to_thread(guard.status))["engine_idle"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.to_thread(guard.confirm_drained, TOKEN)
    assert (await asyncio.to_thread(guard.status))["backend_drained"] is True
