"""How tests look at a run on real parts: its status, its staged files, its engines' own logs."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.service import RPCError

from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import ResolveRun, RunInput, RunStatus, StepRecord, StepStatus
from relax_infer.engines import read_request_log
from relax_infer.machines import RunState
from relax_infer.samples import StagingStore
from relax_infer.training.ledger import Ledger, read_ledger
from workers.local import Stack

Handle = WorkflowHandle[Any, RunStatus]


async def start(client: Client, **fields: Any) -> Handle:
    """A TrainingRun of the quickstart under a fresh id."""
    run = f"run-{uuid.uuid4().hex[:8]}"
    return await client.start_workflow(
        "TrainingRun",
        RunInput.model_validate({"recipe": "quickstart", **fields}),
        id=run,
        task_queue="relax",
        result_type=RunStatus,
    )


def start_as_typed(stack: Stack, run: str, document: dict[str, Any]) -> None:
    """A TrainingRun under this id, by Temporal's own command line."""
    subprocess.run(
        ["temporal", "workflow", "start", "--type", "TrainingRun", "--task-queue", "relax",
         "--workflow-id", run, "--fail-existing", "--id-reuse-policy", "RejectDuplicate",
         "--input", json.dumps(document)],
        env=stack.environment(),
        check=True,
        capture_output=True,
        timeout=60,
    )  # fmt: skip


async def run_documented_program(stack: Stack, run: str, how: str) -> None:
    """The first Python program of docs/python.md, as it is written but for the run's id and what
    else ``RunInput`` is given."""
    text = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    program, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for written, meant in (('"run-1"', f'"{run}"'), ("steps=1", how)):
        assert written in program
        program = program.replace(written, meant)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env=stack.environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 1200)
    finally:
        if process.returncode is None:
            process.kill()
    # The Temporal SDK can crash an interpreter that is about to exit; the answer is out by then.
    assert process.returncode in (0, -signal.SIGSEGV, -signal.SIGABRT), err.decode()[-2000:]
    assert f"'run': '{run}', 'state': 'DONE'" in out.decode()


async def until(
    condition: Callable[[], Any], seconds: float, what: str, *, every: float = 0.1
) -> Any:
    """Wait for a condition, sync or async, to be true; its value. It is looked at ``every`` so many
    seconds: a look that asks a workflow costs server and worker some 10 ms of two cores."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(every)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


async def finish(handle: Handle, seconds: float = 1200) -> RunStatus:
    """The run's end; at once an error when it waits for a person or fails."""

    async def over() -> RunStatus | None:
        seen = await status(handle)
        assert seen is None or seen.state not in (RunState.BLOCKED, RunState.FAILED), seen.doing
        return seen if seen is not None and seen.state is RunState.DONE else None

    await until(over, seconds, f"the end of {handle.id}", every=1.0)
    return await handle.result()


async def end_what_was_started(client: Client, seconds: float = 240) -> None:
    """Stop every run that is still open, and a person's word for one that waits for it."""
    query = "WorkflowType = 'TrainingRun' AND ExecutionStatus = 'Running'"
    for seen in [found async for found in client.list_workflows(query)]:
        handle = client.get_workflow_handle(seen.id, result_type=RunStatus)
        with suppress(RPCError, WorkflowFailureError, WorkflowUpdateFailedError, TimeoutError):
            async with asyncio.timeout(seconds):
                now = await handle.query("status", result_type=RunStatus)
                if now.state is RunState.BLOCKED:
                    await handle.execute_update(
                        "resolve",
                        ResolveRun(
                            who="tests",
                            why="the test has ended",
                            action="stop",
                            confirm_released=True,
                        ),
                    )
                else:
                    await handle.execute_update("stop")
                await handle.result()


async def status(handle: Handle) -> RunStatus | None:
    """None while nobody can answer."""
    try:
        return await handle.query("status", result_type=RunStatus)
    except RPCError:
        return None


async def step_status(client: Client, run: str, step: int) -> StepStatus | None:
    """None while the step does not exist or nobody can answer."""
    try:
        handle = client.get_workflow_handle(f"{run}.step-{step}")
        return await handle.query("status", result_type=StepStatus)
    except RPCError:
        return None


async def lease_status(client: Client, run: str) -> LeaseStatus:
    handle = client.get_workflow_handle(f"{run}.lease")
    return await handle.query("state", result_type=LeaseStatus)


class RunFiles:
    """A run's folder in the store of a local stack."""

    def __init__(self, home: Path, run: str) -> None:
        self.ref = RunRef(run=run, store=(home / "store").as_uri())
        self.folder = home / "store" / run
        self.store = StagingStore(self.ref)

    def record(self, step: int) -> StepRecord:
        path = self.folder / "steps" / str(step) / "record.json"
        return StepRecord.model_validate_json(path.read_text())

    def shards(self, step: int, phase: str) -> dict[int, str]:
        return self.store.shards(step, phase)

    def attempts(self, step: int, phase: str) -> int:
        return len(list((self.folder / "steps" / str(step) / phase).glob("attempt-*.json")))

    def ledger(self) -> Ledger:
        return read_ledger(self.ref)

    def requests(self, prefix: str) -> list[dict[str, Any]]:
        """Events of every engine's request log for request ids of a prefix, in order of time."""
        events = [
            event
            for path in self.folder.glob("engines/requests/*.jsonl")
            for event in read_request_log(path)
            if str(event["rid"]).startswith(prefix)
        ]
        return sorted(events, key=lambda event: event["t"])
