"""Requests are ended by their ids, whatever ids the engine makes of them, and no others are."""

import asyncio
import json

import aiohttp
import pytest

from relax_infer.engines.control import EngineControl
from tests.engines.fake_engine import TOKEN
from tests.engines.fenced import ask, fake, started

__all__ = ["fake"]


async def test_abort_by_prefix_takes_those_and_no_others(fake):
    made, client = fake
    mine = [await started(made, client, f"run/1/generated/g{k}/s0/a1") for k in range(3)]
    other = await started(made, client, "run/2/generated/g0/s0/a1")
    control = EngineControl(made.socket)
    assert len(await control.abort("run/1/", TOKEN)) == 3
    assert [answer["aborted"] for _, answer in await asyncio.gather(*mine)] == [True] * 3
    await made.until(lambda: made.fence.gate.inflight == 1)
    assert await control.requests("run/1/") == []
    assert await control.requests("run/2/") == ["run/2/generated/g0/s0/a1"]
    made.engine.running["run/2/generated/g0/s0/a1"].set()
    assert (await other)[1]["aborted"] is False


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
    assert await EngineControl(made.socket).abort("run/1/", TOKEN) != []
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
            assert await EngineControl(made.socket).abort("r10", TOKEN) == ["r10"]
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


DIGITS = b"7" * 5000
WRITTEN = {
    "more digits than Python takes": b'{"rid":"%b","text":"a","x":' + DIGITS + b"}",
    "an escape, and such a number": b'{"rid":"%b","text":"\\u00df","x":' + DIGITS + b"}",
    "a float beyond all": b'{"x":[1e400, -1e-400 ,1.10],"rid" :\t"%b"  ,"text":"a"}',
    "NaN": b'{"x":NaN,"rid":"%b"}',
    "ids in a list": b'{"x": 1e400, "rid" : [ "%b" ] }',
    "the last of two": b'{"rid":"zz","y":{"rid":"n"},"rid":"%b","text":"\\u0061\\/"}',
    "an escaped key": b'{"r\\u0069d":"%b","x":1E+2}',
    "a byte order mark": b'\xef\xbb\xbf{"rid":"%b", "x":1e400}',
}


@pytest.mark.parametrize("body", WRITTEN.values(), ids=WRITTEN)
async def test_of_a_request_under_a_private_id_nothing_else_is_written_anew(fake, body):
    """Numbers beyond any type are the engine's to judge, and their digits come to it."""
    made, client = fake
    one = await started(made, client, "r1")
    two = asyncio.create_task(client.post("/generate", data=body % b"r10"))
    await made.until(lambda: len(made.engine.running) == 2)
    (private,) = set(made.engine.running) - {"r1"}
    assert private.startswith("fence-")
    before, _, after = body.partition(b"%b")
    sent = made.engine.bodies[-1]
    if b"[ " in before:
        before, after = b'{"x": 1e400, "rid" : ["', b'"] }'
    assert sent == before + private.encode() + after
    for done in list(made.engine.running.values()):
        done.set()
    async with await two as answer:
        assert (answer.status, (await answer.json())["rid"]) == (200, "r10")
    await one


async def test_what_is_utf_16_stays_so(fake):
    made, client = fake
    one = await started(made, client, "r1")
    body = '{"rid": "r10", "text": "\u2713", "x": 1e400}'
    two = asyncio.create_task(client.post("/generate", data=body.encode("utf-16")))
    await made.until(lambda: len(made.engine.running) == 2)
    (private,) = set(made.engine.running) - {"r1"}
    assert made.engine.bodies[-1].decode("utf-16") == body.replace("r10", private)
    for done in list(made.engine.running.values()):
        done.set()
    assert (await two).status == 200
    await one


REFUSED = {
    "another thing among the ids": b'{"rid":["r10",{"a":1}]}',
    "a number among the ids": b'{"rid":["r10",7]}',
    "bytes that are no text": b'{"rid":"r10","x":"\xff"}',
    "a deep list": b'{"rid":"r10","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a deep list, with an escape": (
        b'{"rid":"r10","y":"\\u0061","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
async def test_a_body_that_cannot_be_written_with_another_id_is_refused(fake, body):
    made, client = fake
    one = await started(made, client, "r1")
    async with client.post("/generate", data=body) as answer:
        assert answer.status == 400
        assert (await answer.json()).keys() == {"detail"}
    assert len(made.engine.bodies) == 1
    made.engine.running["r1"].set()
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
