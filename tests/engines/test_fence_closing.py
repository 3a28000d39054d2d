"""Who closes, drains and opens a fence, on whose word, and what of the engine asks for it."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines._routes import needs_token
from relax_infer.engines.control import EngineControl, OvertakenError
from relax_infer.engines.drain import confirm_drained, drain, settle
from tests.engines.fake_engine import TOKEN
from tests.engines.fenced import LATER, ask, fake, started
from tests.engines.sglang_routes import CHANGING_PATHS, listed_routes

__all__ = ["fake"]


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
        await control.confirm_drained(LATER)
    status = await control.status()
    assert (status["ready"], status["inflight"], status["backend_drained"]) == (False, 1, False)
    made.engine.running["r"].set()
    assert await running == (200, {"rid": "r", "aborted": False})
    assert made.engine.aborted == []
    await confirm_drained(control, LATER, 10)
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
    await confirm_drained(control, LATER, 10)
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
    await confirm_drained(control, LATER, 10)
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


async def test_drained_is_confirmed_only_when_gate_table_and_scheduler_agree(fake):
    made, client = fake
    control = EngineControl(made.socket)
    with pytest.raises(PermanentError, match="open"):
        await control.confirm_drained(LATER)
    task = await started(made, client, "r")
    made.fence.gate.close()
    with pytest.raises(PermanentError, match="in flight"):
        await control.confirm_drained(LATER)
    made.engine.running["r"].set()
    await task
    made.engine.running["ghost"] = asyncio.Event()
    with pytest.raises(PermanentError, match=r"ghost|scheduler is not idle"):
        await control.confirm_drained(LATER)
    del made.engine.running["ghost"]
    made.engine.busy_scheduler = True
    with pytest.raises(PermanentError, match="scheduler"):
        await control.confirm_drained(LATER)
    assert made.fence.gate.status()["backend_drained"] is False
    made.engine.busy_scheduler = False
    await control.confirm_drained(LATER)
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
        control.abort("", stale),
        control.confirm_drained(stale),
    ):
        with pytest.raises(PermanentError, match="stale"):
            await call
    assert made.engine.seen == []
    assert made.fence.gate.ready is False
    await control.open(LATER)
    assert made.fence.memory.seen == LATER


@pytest.mark.parametrize("counter", [str(2**62), "9" * 5000])
async def test_a_counter_that_no_grant_reaches_locks_nobody_out(fake, counter):
    made, _ = fake
    async with aiohttp.ClientSession(
        "http://fence", connector=aiohttp.UnixConnector(str(made.socket))
    ) as private:
        headers = {"x-relax-fence": f"{counter}:a"}
        async with private.post("/_fence/close", headers=headers) as answer:
            assert answer.status == 409
            told = await answer.json()
    assert "has a counter above 9007199254740991" in told["detail"]
    assert told["stale"] is False
    assert made.fence.gate.ready is True
    await EngineControl(made.socket).close(LATER)
    with pytest.raises(ValueError, match="counter"):
        FenceToken(counter=2**62, grant_id="a")


async def test_a_late_drain_of_an_earlier_grant_ends_nothing_of_the_next(fake):
    """It may have begun while the engine was its own, and be at its next abort."""
    made, client = fake
    control = EngineControl(made.socket)
    made.engine.busy_scheduler = True
    late = asyncio.create_task(drain(control, TOKEN, 60))
    await made.until(lambda: ("POST", "/pause_generation") in made.engine.seen)
    # Between two looks of it the engine was drained and opened by the next grant.
    made.fence.memory.admit(LATER)
    made.fence.gate.confirm_backend_drained()
    made.fence.gate.open()
    running = await started(made, client, "theirs")
    with pytest.raises(OvertakenError, match="stale"):
        await late
    assert made.engine.aborted == []
    with pytest.raises(OvertakenError):
        await confirm_drained(control, TOKEN, 60)
    made.engine.running["theirs"].set()
    assert await running == (200, {"rid": "theirs", "aborted": False})
    assert made.fence.gate.status()["backend_drained"] is False


async def test_a_grant_that_comes_while_the_engine_is_asked_is_not_called_drained(fake):
    made, client = fake
    control = EngineControl(made.socket)
    running = await started(made, client, "r")
    made.engine.running["r"].set()
    await running
    await control.close(TOKEN)
    asked, go = asyncio.Event(), asyncio.Event()
    idle = made.fence.backend.idle

    async def slow() -> bool:
        asked.set()
        await go.wait()
        return await idle()

    made.fence.backend.idle = slow
    confirming = asyncio.create_task(control.confirm_drained(TOKEN))
    await asked.wait()
    made.fence.memory.admit(LATER)
    go.set()
    with pytest.raises(OvertakenError):
        await confirming
    assert made.fence.gate.status()["backend_drained"] is False


@pytest.mark.parametrize("path", ["abort?prefix=", "abort?prefix=r", "confirm_drained"])
@pytest.mark.parametrize("token", [None, "", "2", "x:a", "0:a", "1:z"])
async def test_who_ends_requests_or_calls_it_drained_names_the_token(fake, path: str, token):
    made, client = fake
    running = await started(made, client, "r")
    connector = aiohttp.UnixConnector(path=str(made.socket))
    headers = {} if token is None else {"x-relax-fence": token}
    async with (
        aiohttp.ClientSession(connector=connector) as inside,
        inside.post(f"http://engine/_fence/{path}", headers=headers) as response,
    ):
        told = await response.json()
    assert (response.status, told["stale"]) == (409, token in ("0:a", "1:z"))
    assert made.engine.aborted == []
    made.engine.running["r"].set()
    await running
    assert made.fence.memory.seen == TOKEN


async def test_a_token_that_only_ends_requests_is_not_remembered(fake):
    """The grant before it may still be at work here; what it is, its first change says."""
    made, client = fake
    control = EngineControl(made.socket)
    running = await started(made, client, "r")
    assert await control.abort("", LATER) == ["r"]
    assert (await running)[1]["aborted"] is True
    assert made.fence.memory.seen == TOKEN


async def test_requests_that_are_settled_may_outlast_the_grant(fake):
    """Their ids say whose they are: whoever has the engine now has none of them."""
    made, client = fake
    control = EngineControl(made.socket)
    mine = await started(made, client, "run/1/g0")
    abort = made.fence.backend.abort
    made.fence.backend.abort = lambda rid: None
    tokens = iter([TOKEN, TOKEN])
    settling = asyncio.create_task(settle(control, "run/1/", 20, lambda: next(tokens, LATER)))
    await made.until(lambda: next(tokens, None) is None)
    made.fence.memory.admit(LATER)
    await asyncio.sleep(0.2)
    assert not settling.done()
    made.fence.backend.abort = abort
    assert await settling == 1
    assert (await mine)[1]["aborted"] is True


async def test_nothing_changes_without_a_token_on_any_route_of_sglang(fake):
    """By every method, since SGLang takes a GET for a release. A route of a version to come, of
    which nobody has said yet that it leaves the engine as it is, needs one as well."""
    made, _ = fake
    told = [path.replace("{method}", "configure") for path in sorted(CHANGING_PATHS)]
    connector = aiohttp.UnixConnector(path=str(made.socket))
    async with aiohttp.ClientSession(connector=connector) as client:
        for path in (*told, "/release_memory_occupation/", "/swap_model"):
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
    for odd in ("/v1/../slow_down", "//generate", "/generate/", "/Generate", "", "/v1"):
        assert needs_token(odd)
