"""The fence over real HTTP, around an engine that does what the test says."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines import _call, fence
from relax_infer.engines._routes import needs_token
from relax_infer.engines.control import EngineControl
from relax_infer.engines.drain import confirm_drained, drain
from relax_infer.gateway._limits import Limits
from tests.engines.fake_engine import TOKEN, FencedFake, fenced_fake
from tests.engines.sglang_routes import CHANGING_PATHS, listed_routes

LATER = FenceToken(counter=2, grant_id="b")


@pytest.fixture(params=["in the engine", "as a proxy"])
async def fake(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[FencedFake, aiohttp.ClientSession]]:
    """What the fence promises does not depend on where it stands."""
    async with fenced_fake(tmp_path, remote=request.param == "as a proxy") as made:
        yield made


async def ask(client: aiohttp.ClientSession, rid: str, **more: object):
    async with client.post("/generate", json={"rid": rid, **more}) as response:
        return response.status, await response.json()


async def started(fake: FencedFake, client: aiohttp.ClientSession, rid: str):
    task = asyncio.create_task(ask(client, rid))
    await fake.until(lambda: rid in fake.engine.running)
    return task


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
    await made.fence.confirm_drained()
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


async def test_closing_aborts_what_runs_and_what_the_engine_does_not_know_yet(fake):
    made, client = fake
    running = await started(made, client, "known")
    made.engine.deaf_until_started.clear()
    unknown = asyncio.create_task(ask(client, "unknown"))
    await made.until(lambda: len(made.engine.bodies) == 2)
    await EngineControl(made.socket).close(LATER)
    assert (await running)[1] == {"rid": "known", "aborted": True}
    made.engine.deaf_until_started.set()
    assert (await unknown)[1] == {"rid": "unknown", "aborted": True}
    assert [row["reason"] for row in made.log()[-2:]] == ["cancelled", "cancelled"]


async def test_a_drain_lets_what_runs_end_and_admits_nobody(fake):
    made, client = fake
    control = EngineControl(made.socket)
    running = await started(made, client, "r")
    await control.close(LATER, 30)
    assert (await ask(client, "late"))[0] == 503
    with pytest.raises(PermanentError, match="in flight"):
        await control.confirm_drained()
    status = await control.status()
    assert (status["ready"], status["inflight"], status["backend_drained"]) == (False, 1, False)
    made.engine.running["r"].set()
    assert await running == (200, {"rid": "r", "aborted": False})
    assert made.engine.aborted == []
    await confirm_drained(control, 10)
    await control.open(LATER)
    assert [row["reason"] for row in made.log() if row["event"] == "ended"] == ["answered"]


async def test_a_drain_aborts_at_its_deadline_what_is_left(fake):
    made, client = fake
    control = EngineControl(made.socket)
    short, long = [await started(made, client, rid) for rid in ("short", "long")]
    before = asyncio.get_running_loop().time()
    await control.close(LATER, 0.4)
    made.engine.running["short"].set()
    assert (await short)[1]["aborted"] is False
    assert await long == (200, {"rid": "long", "aborted": True})
    assert asyncio.get_running_loop().time() >= before + 0.4
    await made.until(lambda: not made.engine.running)
    await confirm_drained(control, 10)
    reasons = [row["reason"] for row in made.log() if row["event"] == "ended"]
    assert reasons == ["answered", "cancelled"]


async def test_a_drain_is_not_confirmed_before_the_engine_is_idle(fake):
    made, client = fake
    running = await started(made, client, "r")
    made.engine.busy_scheduler = True
    control = EngineControl(made.socket)
    draining = asyncio.create_task(drain(control, LATER, 10, patience=10))
    await made.until(lambda: not made.fence.gate.ready)
    made.engine.running["r"].set()
    assert (await running)[1]["aborted"] is False
    await made.until(lambda: ("POST", "/pause_generation") in made.engine.seen)
    await asyncio.sleep(0.2)
    assert not draining.done()
    assert made.fence.gate.status()["backend_drained"] is False
    made.engine.busy_scheduler = False
    await draining
    assert made.fence.gate.status()["backend_drained"] is True


async def test_a_later_close_only_brings_the_end_of_a_drain_forward(fake):
    made, client = fake
    control = EngineControl(made.socket)
    running = await started(made, client, "r")
    await control.close(LATER, 0.3)
    await control.close(LATER, 3600)
    assert (await running)[1]["aborted"] is True
    await confirm_drained(control, 10)
    await control.open(LATER)
    running = await started(made, client, "s")
    await control.close(LATER, 3600)
    await control.close(LATER)
    assert (await running)[1]["aborted"] is True


@pytest.mark.parametrize(
    "query",
    [
        *("mode=drain", "deadline=3", "mode=drain&deadline=", "mode=drain&deadline=0"),
        *("mode=drain&deadline=nan", "mode=drain&deadline=inf", "mode=cancel&deadline=3"),
        *("mode=drain&deadline=-1", "mode=soft&deadline=3"),
    ],
)
async def test_a_close_that_does_not_say_how_changes_nothing(fake, query: str):
    made, _ = fake
    connector = aiohttp.UnixConnector(path=str(made.socket))
    async with aiohttp.ClientSession(connector=connector) as client:
        url = f"http://engine/_fence/close?{query}"
        async with client.post(url, headers={"x-relax-fence": str(LATER)}) as response:
            assert response.status == 409
            assert "mode=drain with a deadline in seconds" in (await response.json())["detail"]
    assert made.fence.gate.ready
    assert made.fence.memory.seen == TOKEN


async def test_closing_refuses_a_request_whose_body_is_still_coming(fake):
    made, _ = fake
    host, port = made.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await made.until(lambda: made.fence.gate.inflight == 1)
    await EngineControl(made.socket).close(LATER)
    assert b" 503 " in await reader.readline()
    writer.close()
    assert made.engine.seen == []
    await made.until(lambda: made.fence.gate.inflight == 0)


async def test_a_stream_is_passed_on_part_by_part_and_counts_until_its_last(fake):
    made, client = fake
    async with client.post("/generate", json={"rid": "r", "stream": True}) as response:
        assert await response.content.read(7) == b"data: 1"
        assert made.fence.gate.inflight == 1
        made.engine.running["r"].set()
        assert await response.content.read() == b"data: 2"
    await made.until(lambda: made.fence.gate.inflight == 0)


async def test_abort_by_prefix_takes_those_and_no_others(fake):
    made, client = fake
    mine = [await started(made, client, f"run/1/generated/g{k}/s0/a1") for k in range(3)]
    other = await started(made, client, "run/2/generated/g0/s0/a1")
    control = EngineControl(made.socket)
    assert len(await control.abort("run/1/")) == 3
    assert [answer["aborted"] for _, answer in await asyncio.gather(*mine)] == [True] * 3
    await made.until(lambda: made.fence.gate.inflight == 1)
    assert await control.requests("run/1/") == []
    assert await control.requests("run/2/") == ["run/2/generated/g0/s0/a1"]
    made.engine.running["run/2/generated/g0/s0/a1"].set()
    assert (await other)[1]["aborted"] is False


async def test_drained_is_confirmed_only_when_gate_table_and_scheduler_agree(fake):
    made, client = fake
    control = EngineControl(made.socket)
    with pytest.raises(PermanentError, match="open"):
        await control.confirm_drained()
    task = await started(made, client, "r")
    made.fence.gate.close()
    with pytest.raises(PermanentError, match="in flight"):
        await control.confirm_drained()
    made.engine.running["r"].set()
    await task
    made.engine.running["ghost"] = asyncio.Event()
    with pytest.raises(PermanentError, match=r"ghost|scheduler is not idle"):
        await control.confirm_drained()
    del made.engine.running["ghost"]
    made.engine.busy_scheduler = True
    with pytest.raises(PermanentError, match="scheduler"):
        await control.confirm_drained()
    assert made.fence.gate.status()["backend_drained"] is False
    made.engine.busy_scheduler = False
    await control.confirm_drained()
    assert (await control.status())["backend_drained"] is True


@pytest.mark.parametrize(
    "stale", [FenceToken(counter=1, grant_id="z"), FenceToken(counter=2, grant_id="z")]
)
async def test_open_close_and_lifecycle_paths_refuse_an_older_or_rival_token(fake, stale):
    made, _ = fake
    control = EngineControl(made.socket)
    await control.close(LATER)
    for call in (
        control.open(stale),
        control.close(stale),
        control.release(("weights",), stale, 10),
        control.load(Path("folder"), 1, stale, 10),
    ):
        with pytest.raises(PermanentError, match="stale"):
            await call
    assert made.engine.seen == []
    assert made.fence.gate.ready is False
    await control.open(LATER)
    assert made.fence.memory.seen == LATER


async def test_nothing_changes_without_a_token_on_any_route_of_sglang(fake):
    """By every method, since SGLang takes a GET for a release. A route of a version to come, of
    which nobody has said yet that it leaves the engine as it is, needs one as well."""
    made, _ = fake
    told = [path.replace("{method}", "configure") for path in sorted(CHANGING_PATHS)]
    connector = aiohttp.UnixConnector(path=str(made.socket))
    async with aiohttp.ClientSession(connector=connector) as client:
        for path in (*told, "/release_memory_occupation/", "/swap_model", "/generate/../slow_down"):
            for method in ("GET", "POST", "PUT", "DELETE"):
                async with client.request(method, f"http://engine{path}") as response:
                    assert (path, response.status) == (path, 409)
                    assert "x-relax-fence" in (await response.json())["detail"]
    assert made.engine.seen == []
    assert made.fence.memory.seen == TOKEN


def test_of_every_route_of_sglang_it_is_said_whether_it_changes_the_engine():
    """One that a new version adds has to be looked at: then it is put into a list."""
    listed = {route.path for route in listed_routes()}
    assert listed >= CHANGING_PATHS, "the list names what SGLang does not have any more"
    needing = {path for path in listed if needs_token(path)}
    assert needing == CHANGING_PATHS


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


LEFT = {
    "a batch of one id": {"rid": "x", "text": ["a", "b", "c"]},
    "a batch of ids": {"rid": ["x", "y"], "text": ["a", "b"]},
    "samples": {"rid": "x", "sampling_params": {"n": 3}, "stream": True},
    "samples without an id": {"sampling_params": {"n": 2}, "stream": True},
    "no id": {"text": "a"},
}


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT)
async def test_whatever_ids_an_engine_makes_they_end_with_the_caller_that_leaves(fake, body):
    """pains 19: the payload's own id names none of them."""
    made, client = fake
    other = await started(made, client, "other")
    task = asyncio.create_task(client.post("/generate", json=body))
    await made.until(lambda: len(made.engine.running) > 1)
    theirs = set(made.engine.running) - {"other"}
    assert len(theirs) == len(set(body.get("text", ""))) or "sampling_params" in body
    if body.get("stream"):
        (await task).close()
    else:
        task.cancel()
    await made.until(lambda: set(made.engine.running) == {"other"})
    assert theirs <= set(made.engine.aborted)
    await made.until(lambda: made.fence.gate.inflight == 1)
    made.engine.running["other"].set()
    assert (await other)[1] == {"rid": "other", "aborted": False}


async def test_samples_are_aborted_by_the_id_that_the_payload_names(fake):
    made, client = fake

    async def ended(answer: aiohttp.ClientResponse) -> bool:
        told = await answer.json()
        if made.remote is None:
            return told["aborted"]
        # Nothing but closing its connection ends it there, so there is nobody left to answer.
        return (answer.status, told) == (503, {"detail": "The request was aborted"})

    body = {"rid": "run/1/g0", "sampling_params": {"n": 2}}
    by_prefix = asyncio.create_task(client.post("/generate", json=body))
    await made.until(lambda: len(made.engine.running) == 2)
    assert await EngineControl(made.socket).abort("run/1/") != []
    assert await ended(await by_prefix)
    await made.until(lambda: not made.engine.running)
    by_id = asyncio.create_task(client.post("/generate", json=body))
    await made.until(lambda: len(made.engine.running) == 2)
    async with client.post("/abort_request", json={"rid": "run/1/g0"}) as response:
        assert response.status == 200
    assert await ended(await by_id)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"rid": "", "abort_all": True}, 400),
        ({"abort_all": True}, 400),
        ({}, 400),
        ([], 400),
        ({"rid": "run", "abort_all": True}, 200),
        ({"rid": ["run/1", "nobody"]}, 200),
    ],
)
async def test_a_caller_ends_nobody_else_s_requests(fake, body, status):
    """SGLang would end every request, or each whose id begins so."""
    made, client = fake
    one = await started(made, client, "run/1/g0")
    async with client.post("/abort_request", json=body) as response:
        assert response.status == status, await response.text()
    assert set(made.engine.running) == {"run/1/g0"}
    made.engine.running["run/1/g0"].set()
    assert (await one)[1]["aborted"] is False


async def test_a_body_that_cannot_be_read_for_its_id_is_400(fake):
    made, client = fake
    deep = b'{"rid": "r", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for path in ("/generate", "/abort_request"):
        async with client.post(path, data=deep) as response:
            assert response.status == 400
            assert "nested too deeply" in (await response.json())["detail"]
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


def test_the_limit_is_a_gateway_s():
    assert Limits.body_bytes == _call.BODY_BYTES


@pytest.mark.parametrize(("first", "second"), [("r1", "r10"), ("r10", "r1")])
async def test_a_caller_that_leaves_ends_no_other_whose_id_begins_alike(fake, first, second):
    """SGLang aborts by prefix; the later of the two has another id in the engine, of which neither
    caller sees anything."""
    made, client = fake
    one = await started(made, client, first)
    two = asyncio.create_task(ask(client, second))
    await made.until(lambda: len(made.engine.running) == 2)
    (private,) = set(made.engine.running) - {first}
    assert private.startswith("fence-")
    control = EngineControl(made.socket)
    assert await control.requests("") == sorted((first, second))
    three = asyncio.create_task(ask(client, "r100"))
    await made.until(lambda: len(made.engine.running) == 3)
    one.cancel()
    await made.until(lambda: first not in made.engine.running)
    assert len(made.engine.running) == 2
    three.cancel()
    await made.until(lambda: set(made.engine.running) == {private})
    made.engine.running[private].set()
    assert await two == (200, {"rid": second, "aborted": False})


@pytest.mark.parametrize("how", ["prefix", "id", "leaves"])
async def test_a_request_under_a_private_id_is_aborted_by_its_own(fake, how):
    made, client = fake
    one = await started(made, client, "r1")
    two = asyncio.create_task(ask(client, "r10"))
    await made.until(lambda: len(made.engine.running) == 2)
    match how:
        case "prefix":
            assert await EngineControl(made.socket).abort("r10") == ["r10"]
        case "id":
            async with client.post("/abort_request", json={"rid": "r10"}) as response:
                assert response.status == 200
        case _:
            two.cancel()
    await made.until(lambda: set(made.engine.running) == {"r1"})
    if how != "leaves":
        assert await two == (200, {"rid": "r10", "aborted": True})
    made.engine.running["r1"].set()
    assert (await one)[1]["aborted"] is False


async def test_a_stream_and_a_batch_under_private_ids_say_the_callers_own(fake):
    made, client = fake
    one = await started(made, client, "r1")
    body = {"rid": ["q", "r1\u2713"], "text": ["a", "b"], "big": 12345678901234567890}
    post = asyncio.create_task(client.post("/generate", json=body))
    await made.until(lambda: len(made.engine.running) == 3)
    sent = json.loads(made.engine.bodies[-1])
    private = sent["rid"][1]
    assert sent == body | {"rid": ["q", private]}
    assert private.startswith("fence-")
    async with client.post("/generate", json={"rid": "r12", "stream": True}) as stream:
        assert await stream.content.read(7) == b"data: 1"
        for done in list(made.engine.running.values()):
            done.set()
        assert await stream.content.read() == b"data: 2"
    async with await post as response:
        assert (await response.json())["rid"] == "q"
    await one


async def test_an_id_that_the_engine_has_is_left_to_the_engine_and_its_owner_lives(fake):
    made, client = fake
    one = await started(made, client, "r1")
    made.engine.deaf_until_started.clear()
    two = asyncio.create_task(ask(client, "r1"))
    left = asyncio.create_task(ask(client, "r1"))
    await made.until(lambda: len(made.engine.bodies) == 3)
    left.cancel()
    await made.until(lambda: any(call.left for call in made.fence._calls))
    made.engine.deaf_until_started.set()
    assert (await two)[0] == 400
    await made.until(lambda: made.fence.gate.inflight == 1)
    assert made.engine.aborted == []
    made.engine.running["r1"].set()
    assert await one == (200, {"rid": "r1", "aborted": False})


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
