"""Sealed payloads: nothing readable reaches the server, and nothing that was changed comes back."""

import asyncio
import base64
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from google.protobuf import json_format
from temporalio.api.common.v1 import Payload, Payloads
from temporalio.client import Client, WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import ServiceClient
from temporalio.worker import Replayer, Worker

from relax_infer.cli._codec import codec_app
from relax_infer.cli._history import innermost, payload_value
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.policies import QUEUES
from relax_infer.contracts.run import RunInput, RunStatus
from relax_infer.machines import RunState
from relax_infer.security import codec as codec_module
from relax_infer.security.codec import SealingCodec, sealed
from relax_infer.security.sealing import NotSealedError, Sealer, load_sealer
from tests.workflows.conftest import temporal  # noqa: F401 - a fixture
from tests.workflows.scripted_world import ScriptedWorld
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workflows import WORKFLOWS

UI = "http://127.0.0.1:8233"


def keys(folder: Path, *names: str) -> dict[str, str]:
    path = folder / "keys"
    lines = [f"{name} {base64.b64encode(os.urandom(32)).decode()}" for name in names]
    path.write_text("# newest first\n" + "\n".join(lines) + "\n")
    path.chmod(0o600)
    return {"RELAX_PAYLOAD_KEYS": str(path)}


def sealer(folder: Path, *names: str) -> Sealer:
    made = load_sealer(keys(folder, *(names or ("k1",))))
    assert made is not None
    return made


def test_what_is_sealed_opens_under_its_key_and_is_never_the_same_twice(tmp_path: Path):
    made = sealer(tmp_path, "k2", "k1")
    one, other = made.seal(b"a prompt"), made.seal(b"a prompt")
    assert one != other
    assert b"a prompt" not in one
    assert made.open(one, "k2") == b"a prompt"
    old = Sealer("k1", made.keys).seal(b"of last year")
    assert made.open(old, "k1") == b"of last year"


@pytest.mark.parametrize("change", ["nonce", "text", "tag", "name", "unknown"])
def test_what_was_changed_does_not_open(tmp_path: Path, change: str):
    made = sealer(tmp_path, "k1", "k2")
    text = bytearray(made.seal(b"a prompt"))
    if change in ("nonce", "text", "tag"):
        text[{"nonce": 0, "text": 13, "tag": -1}[change]] ^= 1
    name = {"name": "k2", "unknown": "k9"}.get(change, "k1")
    with pytest.raises(NotSealedError):
        made.open(bytes(text), name)


def test_keys_are_not_printed(tmp_path: Path):
    made = sealer(tmp_path)
    assert repr(made) == "Sealer(k1)"


@pytest.mark.parametrize("text", ["", "k1", "k1 c2hvcnQ=", "a b c", "k1 !!!", "k/1 " + "A" * 44])
def test_a_file_that_has_no_usable_key_is_refused_without_telling_it(tmp_path: Path, text: str):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(PermanentError) as refused:
        load_sealer({"RELAX_PAYLOAD_KEYS": str(path)})
    assert "c2hvcnQ" not in str(refused.value)


def test_keys_that_others_may_read_are_refused(tmp_path: Path):
    given = keys(tmp_path, "k1")
    Path(given["RELAX_PAYLOAD_KEYS"]).chmod(0o644)
    with pytest.raises(PermanentError, match="may be read by others"):
        load_sealer(given)


def test_nothing_is_sealed_unless_somebody_named_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RELAX_PAYLOAD_KEYS", raising=False)
    assert sealed(pydantic_data_converter) is pydantic_data_converter


@pytest.mark.asyncio(loop_scope="session")
async def test_a_run_with_keys_leaves_nothing_to_read_on_the_server(
    temporal: Client,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The same run as always; its histories hold no recipe, path, sample count or error text."""
    for name, value in keys(tmp_path, "k1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(codec_module, "_known", load_sealer)
    converter = sealed(pydantic_data_converter)
    service: ServiceClient = temporal.service_client
    client = Client(service, data_converter=converter)
    world = ScriptedWorld()
    world.faults["train_step"] = ["refuse"]
    run = f"run-{uuid.uuid4().hex[:8]}"
    workers = [
        Worker(
            client,
            task_queue=queue,
            workflows=WORKFLOWS if queue == "relax" else [],
            activities=world.activities(),
            workflow_runner=workflow_runner(),
            workflow_failure_exception_types=FAILS_WORKFLOW,
        )
        for queue in QUEUES
    ]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        handle = await client.start_workflow(
            "TrainingRun",
            RunInput(recipe="scripted", steps=1),
            id=run,
            task_queue="relax",
            result_type=RunStatus,
        )
        async with asyncio.timeout(90):
            while True:
                status = await handle.query("status", result_type=RunStatus)
                if status.state is RunState.BLOCKED:
                    break
                await asyncio.sleep(0.1)
        await handle.execute_update("resolve", {"who": "ada", "why": "test", "action": "stop"})
        assert (await handle.result()).state is RunState.DONE
        names = (run, f"{run}.step-1", f"{run}.lease", f"{run}.rollout.policy")
        histories = [await client.get_workflow_handle(name).fetch_history() for name in names]
        with pytest.raises(WorkflowFailureError):
            await client.get_workflow_handle(f"{run}.step-1").result()
    finally:
        await asyncio.gather(*(worker.shutdown() for worker in workers))
        await asyncio.gather(*tasks)
    text = "".join(history.to_json() for history in histories)
    plain = _plain(json.loads(f"[{','.join(h.to_json() for h in histories)}]"))
    assert "YmluYXJ5L2VuY3J5cHRlZA" in text  # binary/encrypted
    for word in ("scripted", "model_path", "operation_id", "train_step refused", "Traceback"):
        assert word not in plain, word
    failed = histories[1].events[-1].workflow_execution_failed_event_attributes.failure
    assert failed.message == "Encoded failure"
    assert innermost(failed) not in ("", "Encoded failure")
    replayer = Replayer(
        workflows=WORKFLOWS,
        data_converter=converter,
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FAILS_WORKFLOW,
    )
    for history in histories:
        await replayer.replay_workflow(history)


def _plain(value: object, key: str = "") -> str:
    """Everything that stands in a history, payloads decoded from base64; search attributes, which
    the server must read, left out."""
    if isinstance(value, dict):
        return " ".join(_plain(v, k) for k, v in value.items() if k != "searchAttributes")
    if isinstance(value, list):
        return " ".join(_plain(each, key) for each in value)
    if key == "data":
        return base64.b64decode(str(value)).decode(errors="replace")
    return str(value)


@pytest.fixture
def asking(tmp_path: Path) -> Callable[[], TestClient]:
    return lambda: TestClient(TestServer(codec_app(sealer(tmp_path), UI)))


async def test_the_codec_opens_for_the_web_ui_and_for_no_other_page(
    tmp_path: Path, asking: Callable[[], TestClient]
):
    async with asking() as client:
        text = json_format.MessageToJson(
            Payloads(payloads=[Payload(metadata={"encoding": b"json/plain"}, data=b'"a prompt"')])
        )
        answer = await client.post("/encode", data=text, headers={"Origin": UI})
        sealed_text = await answer.text()
        assert answer.headers["Access-Control-Allow-Origin"] == UI
        assert base64.b64encode(b'"a prompt"').decode() not in sealed_text
        opened = await client.post("/decode", data=sealed_text, headers={"Origin": UI})
        assert json.loads(await opened.text()) == json.loads(text)
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example:8888"}):
            refused = await client.post("/decode", data=sealed_text, headers=headers)
            assert refused.status == 403
        before = await client.options("/decode", headers={"Origin": UI})
        assert before.status == 204
        broken = await client.post("/decode", data="{", headers={"Origin": UI})
        assert broken.status == 400


def test_the_command_line_reads_what_was_sealed_and_says_nothing_of_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = sealer(tmp_path)
    monkeypatch.setattr(codec_module, "_known", lambda: made)
    plain = Payload(metadata={"encoding": b"json/plain"}, data=b'"3 of 8 groups"')
    (payload,) = asyncio.run(SealingCodec(made).encode([plain]))
    assert payload_value(payload) == "3 of 8 groups"
    monkeypatch.setattr(codec_module, "_known", lambda: None)
    assert payload_value(payload) is None
