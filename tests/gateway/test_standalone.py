"""``relax-infer gateway``: engines that run already, from a file that says where they are."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

import relax_infer
from relax_infer.cli import app
from relax_infer.contracts.failures import PermanentError
from relax_infer.gateway import RegistryIntake
from relax_infer.gateway._open_files import allow_files
from relax_infer.gateway.registry_file import RegistryFile
from tests.gateway.asking import ask, get
from tests.gateway.fakes import engine, held_port, registry, until
from tests.gateway.test_gateway import echo

CHECKOUT = Path(relax_infer.__file__).parents[1]
SAY = "from relax_infer.cli import main; main()"


@contextlib.contextmanager
def started(file: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway process on a free port, with its address; its log is beside the file."""
    with file.with_suffix(".log").open("w") as log:
        running = subprocess.Popen(
            (sys.executable, "-c", SAY, "gateway", "--port", "0", "--registry", str(file), *more),
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("Gateway on http://"), file.with_suffix(".log").read_text()
        yield running, line.split()[-1]
    finally:
        running.send_signal(signal.SIGTERM)
        code = running.wait(20)
        assert running.stdout is not None
        running.stdout.close()
    assert code == 0


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["gateway", *words])


def document(*engines: str, **changes: Any) -> dict[str, Any]:
    return registry("genrm", *engines) | changes


async def test_it_serves_the_file_and_what_the_file_becomes(tmp_path: Path) -> None:
    file = tmp_path / "registry.json"
    async with engine(echo) as first, engine(echo) as second:
        file.write_text(json.dumps({"genrm": document(first.url)}))
        with started(file) as (_, url):

            async def served() -> str | None:
                answer = await get(f"{url}/genrm/engines")
                if answer.status != 200:
                    return None
                return answer.json["models"]["m"]["engines"][0]["base_url"]

            async def become(wanted: object, found: Any) -> None:
                async with asyncio.timeout(20):
                    while await found() != wanted:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

            async def problem() -> bool:
                return "problem" in (await get(f"{url}/healthz")).json["registry"]

            assert await served() == first.url
            assert (await ask("POST", f"{url}/genrm/generate", {"text": "x"})).status == 200
            assert (await get(f"{url}/teacher/engines")).status == 503
            assert (await get(f"{url}/healthz")).json == {
                "status": "ok",
                "registry": {"file": str(file), "readings": 1},
            }

            file.write_text(json.dumps({"genrm": document(second.url, topology_revision=2)}))
            await become(second.url, served)
            assert (await ask("POST", f"{url}/genrm/generate", {"text": "x"})).status == 200
            assert (len(first.posts), len(second.posts)) == (1, 1)

            wrong = json.dumps({"genrm": document("http://x:1")}).replace("http:", "")
            for broken in ("{", wrong):
                file.write_text(broken)
                await become(True, problem)
                health = await get(f"{url}/healthz")
                assert (health.status, health.json["status"]) == (200, "degraded")
                assert str(file) in health.json["registry"]["problem"]
                assert await served() == second.url
                file.write_text(json.dumps({"genrm": document(second.url, topology_revision=2)}))
                await become(False, problem)
            file.unlink()
            await become(True, problem)
            assert await served() == second.url

            file.write_text(json.dumps({"teacher": registry("teacher", first.url)}))
            await become(None, served)
            assert (await get(f"{url}/teacher/engines")).status == 200
    log = file.with_suffix(".log").read_text()
    assert "is not valid" in log
    assert "is served on" in log


def test_yaml_is_read_too_and_a_forgotten_revision_is_raised(tmp_path: Path) -> None:
    from relax_infer.gateway import RegistryIntake
    from relax_infer.gateway.registry_file import RegistryFile

    file = tmp_path / "registry.yaml"
    intake = RegistryIntake()
    reader = RegistryFile(file, intake)

    def served(*engines: str, **changes: Any) -> tuple[int, str]:
        file.write_text(yaml.safe_dump({"genrm": document(*engines, **changes)}))
        reader.load()
        held = intake.get("genrm")
        assert held is not None
        return held.snapshot.topology_revision, held.etag.decode()

    assert served("http://a:1") == (1, '"epoch-1"')
    assert served("http://a:1") == (1, '"epoch-1"')
    # Whoever holds "epoch-1" must not be told that nothing changed.
    assert served("http://b:1") == (2, '"epoch-2"')
    assert served("http://b:1") == (2, '"epoch-2"')
    assert served("http://c:1", topology_revision=7) == (7, '"epoch-7"')
    assert served("http://d:1", topology_revision=3) == (8, '"epoch-8"')
    assert served("http://d:1", registry_epoch="new") == (1, '"new-1"')


GOOD = document("http://a:1")
WRONG_REPLICA = json.loads(json.dumps(GOOD))
WRONG_REPLICA["models"]["m"]["engines"][0]["pid"] = 7
WRONG_STATE = json.loads(json.dumps(GOOD))
WRONG_STATE["models"]["m"]["state"] = "ready"
WRONG_ROUTING = json.loads(json.dumps(GOOD))
WRONG_ROUTING["routing"]["policy"] = "random"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "must map roles to documents, got list"),
        ("{}", "must map roles to documents"),
        ('{"worker": {}}', "'worker' is no role"),
        ('{"genrm": []}', "genrm: "),
        ('{"genrm": {}}', "genrm: Missing registry fields"),
        ({"teacher": GOOD}, "teacher.role: the document is of genrm"),
        ({"genrm": GOOD | {"phase": 1}}, "genrm: Unknown registry fields: phase"),
        ({"genrm": GOOD | {"schema_version": 1}}, "genrm: schema_version: "),
        ({"genrm": WRONG_REPLICA}, "genrm.models.m.engines.0: Unknown replica fields: pid"),
        ({"genrm": WRONG_STATE}, "genrm.models.m: state: "),
        ({"genrm": WRONG_ROUTING}, "genrm.routing: policy: "),
        ({"genrm": GOOD | {"routing": {"default_model": "x"}}}, "unknown model: x"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_not_valid_ends_it_with_2_and_says_where(
    tmp_path: Path, content: Any, says: str
) -> None:
    file = tmp_path / "registry.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    ended = command("--port", "0", "--registry", str(file))
    assert ended.exit_code == 2, ended.output
    assert str(file) in ended.stderr
    assert says in ended.stderr
    assert "schema 2 document" in ended.stderr
    assert ended.stdout == ""


def test_a_file_that_cannot_be_read_ends_it_with_2(tmp_path: Path) -> None:
    for file in (tmp_path / "none.json", tmp_path):
        ended = command("--port", "0", "--registry", str(file))
        assert ended.exit_code == 2
        assert f"{file} cannot be read" in ended.stderr
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    ended = command("--port", "0", "--registry", str(binary))
    assert (ended.exit_code, "is not YAML" in ended.stderr) == (2, True)
    with binary.open("r+b") as large:
        large.truncate(1 << 40)  # nothing of it is read
    ended = command("--port", "0", "--registry", str(binary))
    assert (ended.exit_code, "67108864 are the most" in ended.stderr) == (2, True)


def test_a_port_in_use_ends_it_with_2(tmp_path: Path) -> None:
    file = tmp_path / "registry.json"
    file.write_text(json.dumps({"genrm": GOOD}))
    with held_port() as port:
        ended = command("--port", str(port), "--registry", str(file))
    assert (ended.exit_code, f":{port}: Address already in use" in ended.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--genrm-tokenizer", "judge"], "MODEL=FOLDER"),
        (["--genrm-tokenizer", "judge=/nowhere"], "/nowhere is no folder"),
        (["--genrm-template-kwargs", "judge=[]"], "MODEL=JSON"),
        (["--rollout-router", "router:1"], "--rollout-router: URL must be http"),
        (["--host", "no such host"], "cannot listen on"),
        (["--role", "worker"], "worker"),
        (["--request-timeout", "0"], "--request-timeout"),
        (["--connections", "0"], "--connections"),
    ],
)
def test_options_that_cannot_be_used_end_it_with_2(
    tmp_path: Path, words: list[str], says: str
) -> None:
    file = tmp_path / "registry.json"
    file.write_text(json.dumps({"genrm": GOOD}))
    ended = command("--port", "0", "--registry", str(file), *words)
    assert ended.exit_code == 2, ended.output
    assert says in ended.stderr


async def test_as_many_requests_are_under_way_as_connections_are_asked_for(
    tmp_path: Path,
) -> None:
    go, under_way = asyncio.Event(), 0

    async def wait(request: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
        nonlocal under_way
        under_way += 1
        await go.wait()
        return await echo(request, payload)

    file = tmp_path / "registry.json"
    async with engine(wait) as upstream:
        file.write_text(json.dumps({"genrm": document(upstream.url)}))
        with started(file, "--connections", "2") as (_, url):
            url += "/genrm/generate"
            asked = [asyncio.create_task(ask("POST", url, {"text": "x"})) for _ in range(3)]
            await until(lambda: under_way == 2)
            metrics = url.replace("/generate", "/metrics")
            async with asyncio.timeout(20):
                while 'in_flight{role="genrm"} 3' not in (await get(metrics)).body.decode():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert under_way == 2
            go.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3


@pytest.mark.parametrize(
    ("limit", "asked", "becomes", "says"),
    [
        ((1024, 1024), 400, (1024, 1024), ""),
        ((1024, 8192), 4000, (8128, 8192), ""),
        ((1024, 8192), 4096, (8192, 8192), "ulimit -n 8320"),
        ((1024, 1024), 4096, (1024, 1024), "--connections 448"),
    ],
)
def test_open_files_are_allowed_as_far_as_may_be_and_else_the_log_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: tuple[int, int],
    asked: int,
    becomes: tuple[int, int],
    says: str,
) -> None:
    import resource

    now = [limit]
    monkeypatch.setattr(resource, "getrlimit", lambda which: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, value: now.append(value))
    allow_files(asked)
    assert now[-1] == becomes
    assert (says in caplog.text) if says else not caplog.records


async def test_messages_are_rendered_by_the_named_tokenizer(tmp_path: Path) -> None:
    from tests.gateway.test_judge import MESSAGES, PROMPT, TEMPLATE, save_tokenizer, yes

    save_tokenizer(tmp_path / "judge", TEMPLATE)
    file = tmp_path / "registry.json"
    options = (
        *("--genrm-tokenizer", f"m={tmp_path / 'judge'}", "--genrm-max-new-tokens", "9"),
        *("--genrm-template-kwargs", 'm={"think": true}', "--role", "genrm"),
    )
    async with engine(yes) as upstream:
        file.write_text(json.dumps({"genrm": document(upstream.url)}))
        with started(file, *options) as (_, url):
            answer = await ask("POST", f"{url}/genrm/generate", {"messages": MESSAGES})
            assert (answer.status, answer.json) == (200, {"response": "yes"})
            assert (await get(f"{url}/rollout/health")).status == 404
    sent = json.loads(upstream.posts[0][1])
    assert sent["input_ids"] == [*PROMPT, 2]
    assert sent["sampling_params"]["max_new_tokens"] == 9


async def test_a_stop_lets_a_running_request_end(tmp_path: Path) -> None:
    import aiohttp

    from tests.gateway.test_gateway import CHUNKS, Streaming

    file = tmp_path / "registry.json"
    source = Streaming()
    async with engine(source) as upstream, aiohttp.ClientSession() as session:
        file.write_text(json.dumps({"genrm": document(upstream.url)}))
        with started(file) as (running, url):
            source.go.put_nowait(True)
            payload = {"text": "x", "stream": True}
            async with session.post(f"{url}/genrm/generate", json=payload) as answer:
                assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
                running.send_signal(signal.SIGTERM)
                for _ in CHUNKS[1:]:
                    source.go.put_nowait(True)
                assert await answer.content.read() == b"".join(CHUNKS[1:])
            await until(lambda: running.poll() == 0)


@pytest.mark.parametrize("query", ["", "?app"])
async def test_a_stop_tells_those_whose_answers_do_not_come_in_time_and_aborts_them(
    tmp_path: Path, query: str
) -> None:
    import aiohttp

    from tests.gateway.test_gateway import CHUNKS, Streaming

    file, source = tmp_path / "registry.json", Streaming()

    async def silent(request: Any, payload: dict[str, Any]) -> Any:
        if not payload.get("stream"):
            await asyncio.Event().wait()
        return await source(request, payload)

    async with engine(silent) as upstream, aiohttp.ClientSession() as session:
        file.write_text(json.dumps({"genrm": document(upstream.url)}))
        with started(file) as (running, url):
            address = f"{url}/genrm/generate{query}"
            source.go.put_nowait(True)
            whole = asyncio.create_task(session.post(address, json={"text": "x", "rid": "whole"}))
            payload = {"text": "x", "rid": "parts", "stream": True}
            async with session.post(address, json=payload) as answer:
                assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
                await until(lambda: len(upstream.posts) == 2)
                running.send_signal(signal.SIGTERM)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.content.read()
            async with await whole as answer:
                assert answer.status == 503
                assert await answer.json() == {"detail": "The gateway is shutting down"}
                assert "Retry-After" not in answer.headers
            await until(lambda: running.poll() == 0)
            await until(lambda: sorted(upstream.aborts) == ["parts", "whole"])


async def test_a_pipe_in_the_place_of_the_file_is_said_and_not_waited_for(tmp_path: Path) -> None:
    path, intake = tmp_path / "registry.json", RegistryIntake()
    file = RegistryFile(path, intake)
    os.mkfifo(path)
    async with asyncio.timeout(10):
        with pytest.raises(PermanentError, match="no regular file"):
            await asyncio.to_thread(file.load)
        path.unlink()
        path.write_text(json.dumps({"genrm": document("http://127.0.0.1:1")}))
        await asyncio.to_thread(file.reload)
    assert intake.get("genrm") is not None
    assert "status" not in file.facts()
