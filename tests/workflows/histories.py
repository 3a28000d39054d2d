"""Histories of finished runs on real parts: export them, replay them.

``python -m tests.workflows.histories export ADDRESS RUN HOME`` writes the histories of a run, its
steps, lease, roles and engine groups to tests/histories, without the names of the machine and of
the folder HOME; ``replay`` replays all of them in this process,
``replay traced`` with the interceptor of traces.
"""

import asyncio
import base64
import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Interceptor, Replayer

from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._tracing import StepTraces
from workflows import WORKFLOWS

FOLDER = Path(__file__).parents[1] / "histories"
NAMES = (
    *(".step-0", ".step-1", ".step-2", ".lease", ".rollout", ".genrm", ".weights-1"),
    *(".rollout.policy", ".genrm.judge", ".genrm.judge.replica-0.recovery-1"),
)


async def export(address: str, run: str, home: str) -> None:
    client = await Client.connect(address)
    for name in ("", *NAMES):
        history = await client.get_workflow_handle(f"{run}{name}").fetch_history()
        document = _nameless(json.loads(history.to_json()), home)
        path = FOLDER / f"{(name or '.run').removeprefix('.')}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))


def _nameless(value: Any, home: str, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _nameless(v, home, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_nameless(v, home) for v in value]
    if key == "data" and isinstance(value, str):
        payload = base64.b64decode(value).replace(home.encode(), b"/relax")
        return base64.b64encode(payload).decode()
    if key == "identity":
        return "worker"
    if key == "stackTrace":
        return ""
    return value.replace(home, "/relax") if isinstance(value, str) else value


def load(path: Path) -> WorkflowHistory:
    text = gzip.decompress(path.read_bytes()).decode()
    began = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(began["workflowId"], text)


async def replay(interceptors: Sequence[Interceptor] = ()) -> int:
    """Every history against today's workflows; raises on the first that differs."""
    replayer = Replayer(
        workflows=WORKFLOWS,
        data_converter=pydantic_data_converter,
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FAILS_WORKFLOW,
        interceptors=interceptors,
    )
    paths = sorted(FOLDER.glob("*.json.gz"))
    for path in paths:
        await replayer.replay_workflow(load(path))
    return len(paths)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        asyncio.run(export(*sys.argv[2:5]))
    else:
        print(asyncio.run(replay([StepTraces()] if sys.argv[2:] == ["traced"] else [])))
    # The SDK's threads can abort an interpreter that is being taken down.
    sys.stdout.flush()
    os._exit(0)
