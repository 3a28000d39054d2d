"""The gateway process against a real Temporal server."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from temporalio import workflow
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

import relax_infer
from relax_infer.contracts.failures import PermanentError
from relax_infer.gateway.serve import serve_gateway
from tests.gateway.asking import ask
from tests.gateway.fakes import engine, free_port, held_port, registry, until
from tests.gateway.test_chat import ALIASES, CHAT, complete
from tests.gateway.test_gateway import CHUNKS

CHECKOUT = Path(relax_infer.__file__).parents[1]


@workflow.defn(name="InferenceRole")
class PublishedRole:
    """Answers the query that a gateway asks of a role's workflow."""

    @workflow.run
    async def run(self, document: dict[str, Any]) -> None:
        self.document = document
        await workflow.wait_condition(lambda: False)

    @workflow.query
    def registry(self) -> dict[str, Any]:
        return {"term": 4, "document": self.document}


@pytest.fixture
async def temporal() -> AsyncIterator[WorkflowEnvironment]:
    binary = shutil.which("temporal", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=binary) as server:
        yield server


async def status_of(url: str) -> int | None:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status
    except aiohttp.ClientError:
        return None


async def become(url: str, status: int) -> None:
    async with asyncio.timeout(60):
        while await status_of(url) != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.real
@pytest.mark.timeout(180)
async def test_a_gateway_that_starts_empty_serves_at_once_and_pulls_what_roles_publish(
    temporal: WorkflowEnvironment, tmp_path: Path
) -> None:
    port, socket = free_port(), tmp_path / "gw.sock"
    address = temporal.client.service_client.config.target_host
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.gateway", "--run", "run-1"),
        *("--port", str(port), "--control-socket", str(socket)),
        env={**os.environ, "TEMPORAL_ADDRESS": address, "PYTHONPATH": str(CHECKOUT)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await become(f"{url}/healthz", 200)
        assert await status_of(f"{url}/genrm/engines") == 503  # no such workflow yet
        document = registry("genrm", "http://engine:1")
        await temporal.client.start_workflow(
            "InferenceRole", document, id="run-1.genrm", task_queue="roles"
        )
        async with Worker(
            temporal.client,
            task_queue="roles",
            workflows=[PublishedRole],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            await become(f"{url}/genrm/engines", 200)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session,
            session.get("http://gateway/registry") as answer,
        ):
            held = await answer.json()
        assert held["genrm"]["term"] == 4
        assert held["genrm"]["document"] == document
        assert held.keys() == {"genrm"}
        assert socket.stat().st_mode & 0o777 == 0o600
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 20)
    assert code == 0


async def test_chat_of_a_run_with_engines_of_others_reaches_their_router_without_discovery(
    tmp_path: Path,
) -> None:
    """Finding F2, for a run's own gateway process: nobody pushed, and there is nobody to pull
    from."""
    port = free_port()
    async with engine(complete) as router:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers.gateway", "--run", "run-1"),
            *("--port", str(port), "--control-socket", str(tmp_path / "gw.sock")),
            *("--rollout-router", router.url),
            env={**os.environ, "TEMPORAL_ADDRESS": "127.0.0.1:9", "PYTHONPATH": str(CHECKOUT)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await become(f"{url}/healthz", 200)
            for path in ALIASES:
                for stream in (False, True):
                    sent = json.dumps(CHAT | {"stream": stream}).encode()
                    answer = await ask("POST", f"{url}/rollout{path}", sent)
                    assert answer.status == (200 if stream else 201)
                    whole = b'{"object": "chat.completion"}'
                    assert answer.body == (b"".join(CHUNKS) if stream else whole)
                    assert router.posts[-1][1] == sent
            assert (await ask("POST", f"{url}/rollout/generate", {"text": "x"})).status == 503
            assert (await ask("POST", f"{url}/genrm{ALIASES[0]}", CHAT)).status == 503
        finally:
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 20)
    assert code == 0
    assert router.paths == ["/v1/chat/completions"] * 4


async def test_a_pull_goes_on_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_infer.gateway import RegistryIntake, serve

    monkeypatch.setattr(serve, "_FIRST_PAUSE", 0.001)
    intake, answers = RegistryIntake(), []
    document = registry("genrm", "http://engine:1")

    async def pull(role: str) -> dict[str, Any] | None:
        answers.append(role)
        if len(answers) == 1:
            raise RuntimeError("no Temporal")
        if len(answers) == 2:
            return None
        if len(answers) == 3:
            return {"term": 1, "document": {}}
        return {"term": 1, "document": document}

    await serve._pull(intake, "genrm", pull)
    assert len(answers) == 4
    held = intake.get("genrm")
    assert held is not None
    assert held.snapshot.to_dict() == document


@pytest.mark.parametrize(("pushed", "term"), [(1, 2), (2, 2), (3, 3)])
async def test_a_pull_succeeds_once_also_after_a_push_and_the_newer_one_is_held(
    monkeypatch: pytest.MonkeyPatch, pushed: int, term: int
) -> None:
    """A push that was under way for long may come to a gateway that has just started."""
    from relax_infer.gateway import RegistryIntake, serve

    monkeypatch.setattr(serve, "_FIRST_PAUSE", 0.001)
    intake, answers = RegistryIntake(), []
    document = registry("genrm", "http://engine:1")

    async def pull(role: str) -> dict[str, Any]:
        answers.append(role)
        if len(answers) == 1:
            intake.offer(role, pushed, document)
            raise RuntimeError("no Temporal")
        return {"term": 2, "document": document}

    await serve._pull(intake, "genrm", pull)
    held = intake.get("genrm")
    assert held is not None
    assert (held.term, len(answers)) == (term, 2)


async def test_a_port_or_socket_in_use_is_said_plainly(tmp_path: Path) -> None:
    first = asyncio.create_task(
        serve_gateway(host="127.0.0.1", port=free_port(), control_socket=tmp_path / "gw")
    )
    try:
        await until((tmp_path / "gw").exists)
        with pytest.raises(PermanentError, match="another gateway listens on"):
            await serve_gateway(host="127.0.0.1", port=free_port(), control_socket=tmp_path / "gw")
        with held_port() as port, pytest.raises(PermanentError, match=f"{port}.* in use"):
            await serve_gateway(host="127.0.0.1", port=port, control_socket=tmp_path / "other")
        with pytest.raises(PermanentError, match="longer than 100 bytes"):
            await serve_gateway(
                host="127.0.0.1", port=free_port(), control_socket=tmp_path / ("x" * 100)
            )
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
