"""The fence over real HTTP, around an engine that does what the test says."""

import asyncio
import socket
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relax_infer.engines import _call, fence
from relax_infer.engines.control import EngineControl
from relax_infer.gateway._limits import Limits
from tests.engines.fake_engine import TOKEN
from tests.engines.fenced import ask, fake, started
from tests.engines.sglang_routes import CHANGING_PATHS

__all__ = ["fake"]


HIDDEN = (
    *(("POST", path) for path in sorted(CHANGING_PATHS)),
    *(("GET", path) for path in sorted(CHANGING_PATHS)),
    ("POST", "/flush_cache"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("PUT", "/generate"),
    ("GET", "/generate"),
    ("POST", "//generate"),
    ("POST", "/generate/"),
    ("POST", "/encode"),
    ("GET", "/abort_request"),
    ("GET", "/_fence/status"),
    ("POST", "/_fence/open"),
    ("POST", "/weights_checker"),
)


async def test_the_public_side_hides_everything_but_the_allowlist(fake):
    made, client = fake
    for method, path in HIDDEN:
        async with client.request(method, made.url + path) as response:
            assert (method, path, response.status) == (method, path, 404)
    assert made.engine.seen == []


async def test_the_guard_counts_what_it_admits_refuses_and_how_long_it_drains(fake):
    made, client = fake

    async def counted() -> dict[str, float]:
        async with client.get("/guard/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
        return {
            f"{s.name.removeprefix('relax_guard_')} {s.labels.get('reason', '')}".strip(): s.value
            for s in samples
        }

    task = await started(made, client, "r1")
    during = await counted()
    assert (during["requests_in_flight"], during["open"], during["fence"]) == (1, 1, 1)
    made.engine.running["r1"].set()
    assert (await task)[0] == 200
    waiting = await started(made, client, "r2")
    made.fence.close()
    await waiting
    await made.until(lambda: not made.fence.gate.inflight)
    await made.fence.confirm_drained(TOKEN)
    assert (await ask(client, "r3"))[0] == 503
    after = await counted()
    assert (after["admitted_total"], after["refused_total closed"]) == (2, 1)
    assert after["ended_total answered"] + after["ended_total cancelled"] == 2
    assert (after["requests_in_flight"], after["open"], after["drain_seconds_count"]) == (0, 0, 1)
    assert made.engine.seen == [("POST", "/generate")] * 2


async def test_a_closed_gate_answers_503_with_retry_after_and_the_engine_hears_nothing(fake):
    made, client = fake
    made.fence.gate.close()
    for path in ("/generate", "/v1/chat/completions", "/chat/completions", "/v1/completions"):
        async with client.post(path, json={"rid": "r"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
    assert made.engine.seen == []
    assert [row["event"] for row in made.log()] == ["refused"] * 4


async def test_abort_and_close_session_work_while_closed_and_change_no_count(fake):
    made, client = fake
    made.fence.gate.close()
    before = made.fence.gate.status()
    for path in ("/abort_request", "/close_session"):
        async with client.post(path, json={"rid": "nobody"}) as response:
            assert response.status == 200
    assert made.fence.gate.status() == before


async def test_metadata_never_tells_host_key_or_environment(fake):
    _, client = fake
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        async with client.get(path) as response:
            assert response.status == 200
            assert (await response.json())["model_path"] == "m"
            assert {"host", "api_key", "env"}.isdisjoint(await response.json())


async def test_health_is_the_engine_and_health_generate_is_the_gate(fake):
    made, client = fake
    made.fence.gate.close()
    async with client.get("/health") as alive, client.get("/health_generate") as generates:
        assert (alive.status, generates.status) == (200, 503)


async def test_the_payload_reaches_the_engine_byte_for_byte_under_the_engine_s_own_path(fake):
    made, client = fake
    body = b'{"rid": "r",  "n": 12345678901234567890, "x": 1.50}'
    post = asyncio.create_task(client.post("/chat/completions", data=body))
    await made.until(lambda: "r" in made.engine.running)
    made.engine.running["r"].set()
    async with await post as response:
        assert response.status == 200
    assert made.engine.bodies == [body]
    assert made.engine.seen == [("POST", "/v1/chat/completions")]


async def test_the_log_has_the_request_before_the_engine_and_its_end_after(fake):
    made, client = fake
    task = await started(made, client, "run/1/g0/s0/a1")
    assert [(row["event"], row["rid"]) for row in made.log()] == [("admitted", "run/1/g0/s0/a1")]
    made.engine.running["run/1/g0/s0/a1"].set()
    assert (await task)[0] == 200
    last = made.log()[-1]
    assert (last["event"], last["status"], last["reason"]) == ("ended", 200, "answered")


async def test_a_caller_that_leaves_has_its_request_aborted_and_the_engine_stays_undrained(fake):
    made, client = fake
    task = await started(made, client, "r")
    task.cancel()
    await made.until(lambda: not made.engine.running)
    assert made.engine.aborted == ["r"]
    await made.until(lambda: made.fence.gate.inflight == 0)
    assert made.fence.gate.status()["backend_drained"] is False
    assert made.log()[-1]["reason"] == "disconnected"


async def test_a_caller_that_leaves_before_the_engine_knows_its_request_is_aborted_once_it_does(
    fake,
):
    made, client = fake
    made.engine.deaf_until_started.clear()
    task = asyncio.create_task(ask(client, "r"))
    await made.until(lambda: made.engine.bodies)
    task.cancel()
    await made.until(lambda: any(call.left for call in made.fence._calls))
    made.engine.deaf_until_started.set()
    await made.until(lambda: made.engine.aborted == ["r"])


async def test_a_stream_is_passed_on_part_by_part_and_counts_until_its_last(fake):
    made, client = fake
    async with client.post("/generate", json={"rid": "r", "stream": True}) as response:
        assert await response.content.read(7) == b"data: 1"
        assert made.fence.gate.inflight == 1
        made.engine.running["r"].set()
        assert await response.content.read() == b"data: 2"
    await made.until(lambda: made.fence.gate.inflight == 0)


@pytest.mark.parametrize("fault", ["silence", "break"])
async def test_an_engine_that_cannot_tell_about_itself_is_502_and_unhealthy_and_nothing_is_left(
    fake, fault, monkeypatch
):
    made, client = fake
    monkeypatch.setattr(fence, "ASK_SECONDS", 0.05)
    made.engine.fault = fault
    before = len(asyncio.all_tasks())
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        async with client.get(path) as response:
            assert response.status == 502
            told = "gave no answer within" if fault == "silence" else "answered 500"
            assert told in (await response.json())["detail"]
    async with client.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"alive": False})
    await made.until(lambda: len(asyncio.all_tasks()) <= before + 2)


DEEP = b'{"rid": "r", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
MANY = b'{"text": "x", "rid": [' + b'"a",' * 4096 + b'"a"]}'


@pytest.mark.parametrize(
    ("body", "told"), [(DEEP, "nested too deeply"), (MANY, "rid names 4097 requests, 4096")]
)
async def test_a_body_that_cannot_be_read_for_its_id_is_400(fake, body, told):
    made, client = fake
    for path in ("/generate", "/abort_request"):
        async with client.post(path, data=body) as response:
            assert response.status == 400
            assert told in (await response.json())["detail"]
    assert made.engine.seen == []
    assert made.fence.gate.inflight == 0
    (row,) = made.log()
    assert (row["event"], row["status"], row["reason"]) == ("refused", 400, "body")


@pytest.mark.parametrize(
    "body",
    [rb'{"r\u0069d": "r"}', rb'{"\u0072\u0069\u0064": "r"}', '{"rid": "r"}'.encode("utf-16")],
)
async def test_an_id_is_seen_however_its_key_is_written(fake, body):
    made, client = fake
    post = asyncio.create_task(client.post("/generate", data=body))
    await made.until(lambda: "r" in made.engine.running)
    assert made.log()[0]["rid"] == "r"
    assert await EngineControl(made.socket).requests("") == ["r"]
    made.engine.running["r"].set()
    (await post).close()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/abort_request"])
@pytest.mark.parametrize("known", [True, False])
async def test_a_body_beyond_the_limit_is_413_and_the_engine_hears_nothing(
    fake, path, known, monkeypatch
):
    made, client = fake
    monkeypatch.setattr(_call, "BODY_BYTES", 1000)

    async def parts():
        for _ in range(11):
            yield b" " * 100

    async with client.post(path, data=b" " * 1001 if known else parts()) as response:
        assert response.status == 413
        assert "1000 bytes" in (await response.json())["detail"]
    assert made.engine.seen == []
    assert made.fence.gate.inflight == 0


@pytest.mark.parametrize("path", ["/generate", "/abort_request", "/close_session"])
async def test_a_body_that_is_announced_too_large_is_413_before_it_is_asked_for(fake, path):
    """Its sender waits for a 100 before it sends anything, and here for the answer."""
    made, _ = fake
    reader, writer = await asyncio.open_connection("127.0.0.1", int(made.url.rsplit(":", 1)[1]))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    writer.write(f"{head}content-length: {99 << 30}\r\n\r\n".encode())
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in await reader.read()
    writer.close()
    assert made.engine.seen == []
    assert made.fence.gate.inflight == 0


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/model_info"])
async def test_what_is_only_read_has_no_use_for_a_body_and_keeps_none(fake, path):
    made, _ = fake
    held: list[int] = []

    async def parts():
        for _ in range(64):
            yield b"x" * (1 << 20)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        held.append(len((await receive())["body"]))
        await made.engine._reply(send, 200, {})

    made.fence.app = answer
    async with aiohttp.ClientSession(made.url) as client:
        try:
            async with client.get(path, data=parts()) as response:
                assert response.status == 200
        except aiohttp.ClientError:
            pass  # it was answered before it had sent everything
    assert held == [0]


def test_the_limit_is_a_gateway_s():
    assert Limits.body_bytes == _call.BODY_BYTES


async def test_a_websocket_is_no_way_around(fake):
    made, _ = fake
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        raise AssertionError("nobody reads it")

    await made.fence({"type": "websocket", "path": "/generate"}, receive, send)  # pyright: ignore
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_hundred_and_twenty_requests_are_in_flight_at_once(fake):
    made, _ = fake
    async with aiohttp.ClientSession(
        made.url, connector=aiohttp.TCPConnector(limit=0, family=socket.AF_INET)
    ) as client:
        tasks = [asyncio.create_task(ask(client, f"r{k}")) for k in range(120)]
        await made.until(lambda: len(made.engine.running) == 120)
        assert made.fence.gate.inflight == 120
        for done in list(made.engine.running.values()):
            done.set()
        assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
