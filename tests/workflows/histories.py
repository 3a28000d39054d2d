"""Histories of finished runs on real parts: export them, replay them.

``python -m tests.workflows.histories export ADDRESS RUN`` writes the histories of a run, its step,
lease, roles and engine groups to tests/histories; ``replay`` replays all of them in this process.
"""

import asyncio
import gzip
import sys
from pathlib import Path

from temporalio.client import Client, WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from workers._runner import FAILS_WORKFLOW, workflow_runner
from workflows import WORKFLOWS

FOLDER = Path(__file__).parents[1] / "histories"


async def export(address: str, run: str) -> None:
    client = await Client.connect(address)
    names = [".step-0", ".step-1", ".lease", ".rollout", ".genrm", ".rollout.policy", ".weights-1"]
    for name in ["", *names]:
        history = await client.get_workflow_handle(f"{run}{name}").fetch_history()
        path = FOLDER / f"{(name or '.run').removeprefix('.')}.json.gz"
        path.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))


def load(path: Path) -> WorkflowHistory:
    text = gzip.decompress(path.read_bytes()).decode()
    return WorkflowHistory.from_json(f"replayed-{path.name.partition('.json')[0]}", text)


async def replay() -> int:
    """Every history against today's workflows; raises on the first that differs."""
    replayer = Replayer(
        workflows=WORKFLOWS,
        data_converter=pydantic_data_converter,
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FAILS_WORKFLOW,
    )
    paths = sorted(FOLDER.glob("*.json.gz"))
    for path in paths:
        await replayer.replay_workflow(load(path))
    return len(paths)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        asyncio.run(export(*sys.argv[2:4]))
    else:
        print(asyncio.run(replay()))
