"""One real SGLang server behind the fence, without Ray: what the fence and the drain promise."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from relax_infer.contracts.engines import RESIDENT_TAGS, EngineOperation
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines import expected_digest, host_processes
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.canary import compare_canaries
from relax_infer.engines.fence import ABORT, GATED, METADATA, UNGATED
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.release import find_processes
from relax_infer.machines import ReplicaState
from relax_infer.training.hf_folder import weights_digest
from tests.engines.real_engine import RealEngine, real_engine
from tests.engines.sglang_routes import listed_routes
from tests.engines.walking import Walker, spelled

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = 900


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealEngine]:
    async with real_engine(tmp_path_factory.mktemp("real")) as made:
        yield made


def modes_of_socket(path: str) -> tuple[int, int]:
    """Of the socket and of its folder."""
    socket = Path(path)
    return socket.stat().st_mode & 0o777, socket.parent.stat().st_mode & 0o777


async def generate(url: str, rid: str, tokens: int = 3, **more: Any) -> tuple[int, dict[str, Any]]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [6, 2, 9, 3, 22], "rid": rid, "sampling_params": sampling, **more}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", json=body) as got:
        return got.status, await got.json()


async def running(engine: RealEngine, url: str, *rids: str) -> list[asyncio.Task[Any]]:
    """Long requests that the engine's scheduler is computing."""
    tasks = [asyncio.create_task(generate(url, rid, LONG)) for rid in rids]
    control = await engine.control()
    while True:
        status = await control.status()
        if set(rids) <= set(status["rids"]) and not status["engine_idle"]:
            return tasks
        assert not any(task.done() for task in tasks)


async def test_it_answers_with_the_weights_whose_digest_was_computed_from_the_files(engine):
    url = await engine.ready(0)
    status, answer = await generate(url, "first")
    assert status == 200
    assert answer["meta_info"]["weight_version"] == "0"
    report = await engine.actor.read_weights()
    expected = expected_digest(engine.folder / "version-0", "float32")
    assert (report.weight_version, report.weights_digest) == (0, expected)


async def test_every_process_of_it_carries_its_marker_and_its_socket_is_private(engine):
    await engine.ready(0)
    where = await engine.actor.describe()
    assert len(where.pids) == 3
    holder = HolderFiles(engine.spec, 0).holder()
    assert holder is not None
    assert {row.stamp.pid for row in find_processes(holder.processes)} == set(where.pids)
    assert modes_of_socket(where.socket or "") == (0o600, 0o700)


async def test_its_public_port_has_no_control_of_it(engine):
    url = await engine.ready(0)
    async with aiohttp.ClientSession() as client:
        for path in ("release_memory_occupation", "update_weights_from_disk", "pause_generation"):
            async with client.post(f"{url}/{path}", json={}) as response:
                assert response.status == 404
        async with client.get(f"{url}/server_info") as response:
            assert (await response.json()).keys() <= {
                *("model_path", "served_model_name", "tp_size", "dp_size"),
                *("load_balance_method", "disaggregation_mode"),
            }
        async with client.get(f"{url}/v1/models") as response:
            assert response.status == 200


async def test_no_route_of_the_running_server_but_the_allowlist_is_reached_from_outside(engine):
    """The server's own list, which only its socket tells, against the port that callers have."""
    url = await engine.ready(0)
    where = await engine.actor.describe()
    connector = aiohttp.UnixConnector(path=where.socket or "")
    async with (
        aiohttp.ClientSession(connector=connector) as client,
        client.get("http://engine/openapi.json") as answer,
    ):
        named = {
            (method.upper(), path)
            for path, operations in (await answer.json())["paths"].items()
            for method in operations
        }
    assert {path for _, path in named} <= {route.path for route in listed_routes()}
    assert ("POST", "/update_weights_from_disk") in named
    open_to_all = {(method, path) for method, path in UNGATED} | {("GET", p) for p in METADATA}
    open_to_all |= {("POST", path) for path in (*GATED, ABORT)}
    open_to_all |= {("GET", "/health"), ("GET", "/health_generate")}
    before = await engine.actor.read_weights()
    async with Walker(int(url.rpartition(":")[2])) as walker:
        for method, path in sorted(named - open_to_all):
            assert (path, await walker.ask(method, path)) == (path, 404)
            assert (path, await walker.ask(method, f"/{path}")) == (path, 404)
        for spelling in spelled("/release_memory_occupation"):
            assert await walker.ask("POST", spelling) in (400, 404)
    assert await engine.actor.read_weights() == before
    assert (await generate(url, "after"))[0] == 200


async def test_a_stream_is_whole_and_leaves_nothing_in_flight(engine):
    url = await engine.ready(0)
    body = {"input_ids": [6, 2], "rid": "s", "stream": True, "sampling_params": {}}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", json=body) as got:
        assert (await got.read()).endswith(b"data: [DONE]\n\n")
    assert (await (await engine.control()).status())["inflight"] == 0


async def test_a_caller_that_leaves_ends_its_request_in_the_engine(engine):
    url = await engine.ready(0)
    control = await engine.control()
    (task,) = await running(engine, url, "left")
    task.cancel()
    # Far sooner than its 900 tokens would have ended it, and than SGLang looks for itself (4 s).
    deadline = asyncio.get_running_loop().time() + 2
    while await control.requests("left"):
        assert asyncio.get_running_loop().time() < deadline
    ended = [row for row in await engine.log() if row["rid"] == "left"][-1]
    assert (ended["event"], ended["reason"]) == ("ended", "disconnected")


ABANDONED: dict[str, dict[str, Any]] = {
    "a batch of one id": {"rid": "batch", "input_ids": [[6, 2], [9, 3], [22, 5]]},
    "samples of one id": {"rid": "samples", "input_ids": [6, 2], "sampling_params": {"n": 2}},
    "no id": {"input_ids": [6, 2, 9]},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", ABANDONED.values(), ids=ABANDONED)
async def test_whatever_ids_it_makes_they_end_with_the_caller_that_leaves(engine, body, stream):
    """pains 19: its own names for prompts and samples are none that the payload has."""
    url = await engine.ready(0)
    control = await engine.control()
    sampling = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
    sampling |= body.get("sampling_params", {})
    payload = {**body, "stream": stream, "sampling_params": sampling}
    if "rid" in body:
        payload["rid"] += f"-{stream}"
    prompts = len(body["input_ids"]) if isinstance(body["input_ids"][0], list) else 1
    wanted = ("rid" in body) + prompts * sampling.get("n", 1)
    async with aiohttp.ClientSession() as client:
        asked = asyncio.create_task(client.post(f"{url}/generate", json=payload))
        async with asyncio.timeout(60):
            while len(await control.requests("")) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if stream:
            got = await asked
            assert await got.content.readany()
            got.close()
        else:
            asked.cancel()
    deadline = asyncio.get_running_loop().time() + 2
    # The call itself stays for a while: SGLang's task sleeps after a stream.
    while left := set(await control.requests("")) - {payload.get("rid")}:
        assert asyncio.get_running_loop().time() < deadline, left


async def test_ids_that_begin_alike_are_kept_apart_and_come_back_as_they_were(engine):
    """SGLang would end both: it aborts by prefix."""
    url = await engine.ready(0)
    control = await engine.control()
    (short,) = await running(engine, url, "r1")
    (long,) = await running(engine, url, "r10")
    short.cancel()
    async with asyncio.timeout(30):
        while "r1" in await control.requests(""):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not long.done()
    assert await control.requests("") == ["r10"]
    token = FenceToken.model_validate((await control.status())["fence"])
    assert await control.abort("r10", token) == ["r10"]
    answer = (await long)[1]["meta_info"]
    assert (answer["id"], answer["finish_reason"]["type"]) == ("r10", "abort")


async def test_settling_a_prefix_aborts_those_requests_and_returns_when_they_are_gone(engine):
    url = await engine.ready(0)
    tasks = await running(engine, url, "r/1/generated/g0", "r/1/generated/g1", "r/2/generated/g0")
    assert await engine.actor.settle_requests("r/1/", 20) == 2
    control = await engine.control()
    assert await control.requests("r/1/") == []
    assert await control.requests("") == ["r/2/generated/g0"]
    for task in tasks[:2]:
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert await engine.actor.settle_requests("r/2/", 20) == 1
    assert await engine.actor.settle_requests("r/", 20) == 0


async def test_an_offload_ends_what_runs_proves_idleness_and_answers_nobody(engine):
    url = await engine.ready(0)
    tasks = await running(engine, url, *(f"busy-{k}" for k in range(8)))
    outcome = await engine.operate("offload")
    assert outcome.report.state is ReplicaState.SLEEPING
    assert outcome.report.base_url is None
    evidence = outcome.evidence
    assert evidence is not None
    assert (evidence.proof, evidence.tags) == ("simulated", RESIDENT_TAGS)
    assert evidence.fence.counter == engine.counter
    for task in tasks:
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    status = await (await engine.control()).status()
    assert (status["inflight"], status["backend_drained"], status["engine_idle"]) == (0, True, True)
    assert (await generate(url, "asleep"))[0] == 503
    assert "asleep" not in {row["rid"] for row in await engine.log() if row["event"] == "admitted"}


async def test_awake_again_it_samples_as_before_and_a_new_version_is_read_back(engine):
    url = await engine.ready(0)
    before = (await generate(url, "before", 8))[1]["output_ids"]
    await engine.operate("offload")
    url = await engine.ready(0)
    assert (await generate(url, "after", 8))[1]["output_ids"] == before
    await engine.operate("offload")
    outcome = await engine.operate("onload", 1)
    digest = expected_digest(engine.folder / "version-1", "float32")
    assert (outcome.report.weight_version, outcome.report.weights_digest) == (1, digest)
    answer = (await generate(url, "newer", 8))[1]
    assert answer["meta_info"]["weight_version"] == "1"
    assert answer["output_ids"] != before


@pytest.mark.parametrize(("deadline", "ends"), [(120.0, "length"), (0.2, "abort"), (0.0, "abort")])
async def test_weights_are_loaded_behind_a_closed_gate_once_requests_ended_or_their_time_did(
    engine, deadline: float, ends: str
):
    url = await engine.ready(0)
    (task,) = await running(engine, url, "old-weights")
    weights = engine.spec.weights.model_copy(update={"drain_deadline": deadline})
    group = engine.spec.model_copy(update={"weights": weights})
    loading = asyncio.create_task(engine.operate("load_weights", 1, group=group))
    control = await engine.control()
    while (await control.status())["ready"]:
        assert not loading.done()
    assert (await generate(url, "between"))[0] == 503
    outcome = await loading
    assert outcome.report.state is ReplicaState.READY
    answer = (await task)[1]["meta_info"]
    assert answer["finish_reason"]["type"] == ends
    assert (answer["completion_tokens"] == LONG) == (ends == "length")
    assert answer["weight_version"] == "0"
    assert (await generate(url, "new-weights"))[1]["meta_info"]["weight_version"] == "1"


async def test_onloaded_closed_it_answers_nobody_until_it_is_opened(engine):
    url = await engine.ready(0)
    outcome = await engine.operate("onload", 1, open_admission=False)
    assert outcome.report.state is ReplicaState.ONLOADING
    assert (await generate(url, "early"))[0] == 503
    assert (await generate(await engine.ready(1), "now"))[0] == 200


async def test_a_late_operation_of_an_earlier_grant_changes_nothing(engine):
    await engine.ready(0)
    stale = FenceToken(counter=engine.counter - 1, grant_id=f"grant-{engine.counter - 1}")
    rival = FenceToken(counter=engine.counter, grant_id="rival")
    for token in (stale, rival):
        for kind in ("offload", "load_weights", "stop", "onload"):
            outcome = await engine.actor.operate(
                kind,
                EngineOperation(
                    group=engine.spec,
                    operation_id=f"late-{kind}-{token}",
                    fence=token,
                    weights=engine.weights(1),
                ),
            )
            assert outcome.stale is not None
            assert outcome.stale.counter == engine.counter
            assert outcome.evidence is None
    report = await engine.actor.probe()
    assert (report.state, report.weight_version) == (ReplicaState.READY, 0)


async def test_the_server_itself_refuses_an_earlier_token(engine):
    await engine.ready(0)
    control = await engine.control()
    stale = FenceToken(counter=0, grant_id="z")
    for call in (
        control.open(stale),
        control.close(stale),
        control.release(RESIDENT_TAGS, stale, 10),
        control.load(engine.folder / "version-1", 1, stale, 10),
    ):
        with pytest.raises(PermanentError, match="stale"):
            await call
    assert (await control.status())["ready"] is True
    assert await control.weight_version() == 0


async def test_the_same_operation_id_is_carried_out_once(engine):
    await engine.ready(0)
    first = await engine.operate("offload", operation_id="once")
    again = await engine.operate("offload", operation_id="once")
    await engine.ready(0)
    late = await engine.operate("offload", operation_id="once")
    assert first == again == late
    assert (await engine.actor.probe()).state is ReplicaState.READY


async def test_weights_that_are_not_those_of_the_files_are_never_called_current(engine):
    await engine.ready(0)
    control = await engine.control()
    token = FenceToken(counter=engine.counter, grant_id=f"grant-{engine.counter}")
    # Somebody loads other weights under the label that is expected.
    await control.load(engine.folder / "version-1", 0, token, 30)
    report = await engine.actor.read_weights()
    assert report.state is ReplicaState.FAILED
    assert "digest" in (report.error or "")
    outcome = await engine.operate("load_weights", 1)
    assert (outcome.report.state, outcome.report.error) == (ReplicaState.READY, None)


async def test_files_that_are_not_what_the_trainer_published_are_never_sampled_from(engine):
    """One bit of a number: what the engine holds is what the files hold, and neither is right."""
    await engine.ready(0)
    spoilt = engine.folder / "version-1-spoilt"
    shutil.copytree(engine.folder / "version-1", spoilt)
    published = weights_digest(spoilt)
    path = spoilt / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    weights = WeightsRef(version=1, uri=f"file://{spoilt}", digest=published)
    outcome = await engine.operate("onload", weights=weights)
    assert outcome.report.state is ReplicaState.FAILED
    assert f"The weights in {spoilt} have digest" in (outcome.report.error or "")
    whole = engine.weights(1).model_copy(update={"digest": published})
    again = await engine.operate("onload", weights=whole)
    assert (again.report.state, again.report.error) == (ReplicaState.READY, None)


async def test_a_load_that_cannot_be_done_fails_the_replica_which_then_lets_go_by_ending(engine):
    await engine.ready(0)
    missing = engine.weights(0).model_copy(update={"version": 9, "uri": "/nowhere/version-9"})
    outcome = await engine.operate("load_weights", weights=missing)
    assert outcome.report.state is ReplicaState.FAILED
    assert "version-9" in (outcome.report.error or "")
    outcome = await engine.operate("offload")
    assert outcome.report.state is ReplicaState.SLEEPING
    assert outcome.evidence is not None
    assert outcome.evidence.proof == "process_gone"


async def test_a_server_killed_a_moment_before_its_offload_is_released_by_proof(engine):
    await engine.ready(1)
    first = await engine.actor.describe()
    os.kill(first.pids[0], signal.SIGKILL)
    outcome = await engine.operate("offload")
    assert outcome.report.state is ReplicaState.SLEEPING
    assert outcome.evidence is not None
    assert outcome.evidence.proof == "process_gone"
    assert [pid for pid in first.pids if host_processes.process(pid) is not None] == []
    await engine.ready(1)
    assert (await engine.actor.describe()).incarnation not in (None, first.incarnation)


async def test_an_actor_made_again_finds_the_engine_of_the_last_one_and_proves_it_gone(engine):
    await engine.ready(1)
    before = await engine.actor.describe()
    last, engine.actor = engine.actor, EngineActor(engine.spec, 0)
    report = await engine.actor.probe()
    assert report.state is ReplicaState.FAILED
    assert report.incarnation == before.incarnation
    late = FenceToken(counter=engine.counter - 1, grant_id="g")
    assert (await engine.operate("offload", fence=late)).stale is not None
    outcome = await engine.operate("offload")
    assert outcome.evidence is not None
    assert outcome.evidence.proof == "process_gone"
    assert [pid for pid in before.pids if host_processes.process(pid) is not None] == []
    assert (await last.probe()).state is ReplicaState.FAILED


async def test_offload_by_restart_leaves_no_process_and_onload_starts_another(engine):
    memory_saver, engine.spec = engine.spec, engine.spec.model_copy(update={"offload": "restart"})
    try:
        url = await engine.ready(0)
        first = await engine.actor.describe()
        (task,) = await running(engine, url, "at-the-end")
        outcome = await engine.operate("offload")
        assert outcome.report.state is ReplicaState.SLEEPING
        assert outcome.evidence is not None
        assert outcome.evidence.proof == "process_gone"
        assert [pid for pid in first.pids if host_processes.process(pid) is not None] == []
        assert (await task)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        await engine.ready(1)
        second = await engine.actor.describe()
        assert second.incarnation not in (None, first.incarnation)
        assert (await engine.actor.probe()).weight_version == 1
    finally:
        engine.spec = memory_saver


async def test_an_engine_that_is_ended_leaves_no_file_on_its_host(engine):
    await engine.ready(0)
    holder = HolderFiles(engine.spec, 0).holder()
    assert holder is not None
    left = [*map(Path, holder.shared), Path(holder.scratch)]
    assert [each.parent.name for each in left[:-1]] == ["shm"], "SGLang shares its load elsewhere"
    assert all(each.exists() for each in left)
    await engine.operate("stop")
    assert not any(each.exists() for each in left)


async def test_a_launch_that_fails_tells_the_engine_s_last_words_and_leaves_nothing(engine):
    await engine.operate("stop")
    engine.spec = engine.spec.model_copy(update={"server_args": {"context-length": "many"}})
    try:
        outcome = await engine.operate("onload", 0)
    finally:
        engine.spec = engine.spec.model_copy(update={"server_args": {}})
    assert outcome.report.state is ReplicaState.DEAD
    assert "'many'" in (outcome.report.error or "")
    assert HolderFiles(engine.spec, 0).holder() is None


@pytest.mark.wide
async def test_a_server_that_would_listen_beside_its_fence_refuses_to_start(engine):
    await engine.operate("stop")
    engine.spec = engine.spec.model_copy(update={"server_args": {"tokenizer-worker-num": 2}})
    try:
        outcome = await engine.operate("onload", 0)
    finally:
        engine.spec = engine.spec.model_copy(update={"server_args": {}})
    assert outcome.report.state is ReplicaState.DEAD
    assert "the fence does not cover" in (outcome.report.error or "")


async def test_a_canary_is_kept_for_the_weights_and_holds_over_sleep_and_restart(engine):
    await engine.ready(0)
    files = HolderFiles(engine.spec, 0)
    taken = files.canary()
    assert taken is not None
    assert taken.digest == expected_digest(engine.folder / "version-0", "float32")
    await engine.operate("offload")
    await engine.ready(0)
    assert files.canary() == taken
    await engine.operate("stop")
    await engine.ready(0)
    compare_canaries(taken, files.canary())
    await engine.ready(1)
    assert files.canary().digest != taken.digest


@pytest.mark.wide
async def test_an_engine_that_computes_something_else_fails_its_canary_and_answers_nobody(engine):
    url = await engine.ready(0)
    files = HolderFiles(engine.spec, 0)
    taken = files.canary()
    await engine.operate("offload")
    shifted = tuple(each - 1.0 for each in taken.log_probs)
    files.write_canary(taken.model_copy(update={"log_probs": shifted}))
    outcome = await engine.operate("onload", 0)
    assert outcome.report.state is ReplicaState.FAILED
    assert "canary" in (outcome.report.error or "")
    assert (await generate(url, "wrong"))[0] == 503
    files.write_canary(taken)
    await engine.ready(0)


async def test_health_tells_a_lost_scheduler_from_a_sleeping_engine(engine):
    await engine.ready(0)
    assert (await engine.actor.health()).state is ReplicaState.READY
    await engine.operate("offload")
    assert (await engine.actor.health()).state is ReplicaState.SLEEPING
    await engine.ready(0)
    scheduler = await scheduler_of(engine)
    os.kill(scheduler, signal.SIGKILL)
    deadline = asyncio.get_running_loop().time() + 10
    while host_processes.process(scheduler) is not None:
        assert asyncio.get_running_loop().time() < deadline
    report = await engine.actor.health()
    assert report.state is ReplicaState.FAILED
    assert report.base_url is None
    assert f"process {scheduler} is gone" in (report.error or "")


@pytest.mark.wide
async def test_a_scheduler_that_stands_still_is_noticed_by_its_silence(engine):
    """pains 20: nothing is lost, nothing fails, and nothing goes on."""
    engine.spec = engine.spec.model_copy(update={"health_timeout": 3.0})
    await engine.operate("stop")
    await engine.ready(0)
    scheduler = await scheduler_of(engine)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        deadline = asyncio.get_running_loop().time() + 60
        while (report := await engine.actor.health()).state is ReplicaState.READY:
            assert asyncio.get_running_loop().time() < deadline
        assert "no sign of life" in (report.error or "")
    finally:
        os.kill(scheduler, signal.SIGCONT)
        engine.spec = engine.spec.model_copy(update={"health_timeout": 60.0})
    outcome = await engine.operate("stop")
    assert outcome.report.state is ReplicaState.DEAD


@pytest.mark.wide
async def test_a_person_s_word_is_refused_while_a_process_lives(engine):
    await engine.ready(0)
    last = engine.actor
    engine.actor = EngineActor(engine.spec, 0)  # the old one is gone, as far as anyone can tell
    outcome = await engine.operate("forget", word="ana: rebooted")
    assert outcome.report.state is ReplicaState.FAILED
    assert "live on this host" in (outcome.report.error or "")
    for pid in (await last.describe()).pids:
        os.kill(pid, signal.SIGKILL)
    deadline = asyncio.get_running_loop().time() + 10
    while (await engine.operate("forget", word="ana")).report.state is not ReplicaState.DEAD:
        assert asyncio.get_running_loop().time() < deadline
    await last.probe()  # it is this process's child, and dead only now
    assert HolderFiles(engine.spec, 0).holder() is None
    await engine.ready(0)


async def scheduler_of(engine: RealEngine) -> int:
    for pid in (await engine.actor.describe()).pids:
        row = host_processes.process(pid)
        if row is not None and "schedul" in row.command:
            return pid
    raise AssertionError("no scheduler")
