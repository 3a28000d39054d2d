"""Whether a worker is there: what Temporal remembers of one that is gone is not one."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import PollerInfo, TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from relax_infer.cli import _pollers, _runs
from relax_infer.cli._pollers import FRESH_SECONDS, QUEUE, pollers_of, read_pollers
from tests.cli.conftest import Command, Temporal, eventually, stack_record
from tests.workflows.scripted_world import ScriptedWorld

NOW = 1_000_000.0


def poller(identity: str, seconds_ago: float) -> PollerInfo:
    when = Timestamp()
    when.FromMilliseconds(round((NOW - seconds_ago) * 1000))
    return PollerInfo(identity=identity, last_access_time=when)


def test_a_worker_that_asked_within_the_minute_is_there():
    found = read_pollers(QUEUE, [poller("7@a", 240), poller("8@a", 59)], (), NOW)
    assert (found.asking, found.heard) == (True, 59.0)
    assert str(found) == "asks for work on relax"
    ahead = read_pollers(QUEUE, [poller("7@a", -3)], (), NOW)
    assert (ahead.asking, ahead.heard) == (True, 0.0)


def test_a_worker_that_temporal_only_remembers_is_not_there():
    found = read_pollers(QUEUE, [poller("7@a", FRESH_SECONDS + 15)], (), NOW)
    assert (found.asking, found.remembered) == (False, True)
    assert str(found) == "none has asked for work on relax for 90 s"
    nobody = read_pollers(QUEUE, [], (7,), NOW)
    assert (nobody.asking, nobody.remembered) == (False, False)
    assert str(nobody) == "none asks for work on relax"


def test_a_process_that_has_ended_is_not_there_however_late_it_asked():
    found = read_pollers(QUEUE, [poller("7@a", 1)], (7,), NOW)
    assert (found.asking, found.remembered) == (False, True)
    assert str(found) == "none asks for work on relax: process 7 has ended"
    another = read_pollers(QUEUE, [poller("7@a", 1), poller("77@a", 2)], (7,), NOW)
    assert another.asking


WORKER = """
import asyncio, sys
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

@activity.defn
async def nothing() -> None: ...

async def main() -> None:
    client = await Client.connect(sys.argv[1])
    queues = ("relax", "relax-engines", "relax-train")
    workers = [Worker(client, task_queue=q, activities=[nothing]) for q in queues]
    await asyncio.gather(*(worker.run() for worker in workers))

asyncio.run(main())
"""


@pytest.fixture
def dead_worker(temporal: Temporal, home: Path) -> int:
    """The worker that ``up`` recorded; Temporal has it in mind for minutes to come."""
    process = subprocess.Popen([sys.executable, "-c", WORKER, temporal.address])

    async def asks(client: Client) -> bool:
        described = await client.workflow_service.describe_task_queue(
            DescribeTaskQueueRequest(
                namespace=client.namespace,
                task_queue=TaskQueue(name="relax-engines"),
                task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
            )
        )  # other tests' workers are remembered there, too
        return any(each.identity.startswith(f"{process.pid}@") for each in described.pollers)

    try:
        eventually(lambda: temporal.do(asks))
        fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
        record = {"pid": process.pid, "started": int(fields[19]), "log": "l"}
    finally:
        process.kill()
        process.wait()
    stack_record(home, temporal.address, processes={"worker": record})
    return process.pid


def test_a_dead_worker_of_the_local_stack_is_told_at_once(
    command: Command, temporal: Temporal, dead_worker: int, monkeypatch: pytest.MonkeyPatch
):
    async def read(client: Client) -> None:
        found = await pollers_of(client, Path(os.environ["RELAX_HOME"]), "relax-engines")
        assert dead_worker in found.ended

    temporal.do(read)
    # Other tests' workers are remembered on the same server.
    monkeypatch.setattr(_pollers, "FRESH_SECONDS", 0.0)
    found = command("doctor").stdout
    assert "MISSING worker: none" in found
    assert "`relax-infer up`" in found.partition("MISSING worker")[2].splitlines()[0]


def test_who_waits_for_a_run_hears_once_and_early_that_no_worker_is_there(
    remote: Command, temporal: Temporal, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    """And its request is carried out when one comes."""
    with temporal.working(ScriptedWorld()):
        remote("run", "quickstart", "--run-id", run_id, "--steps", "500", "--no-follow")
        eventually(lambda: "RUNNING" in remote("status", run_id).stdout)
    monkeypatch.setattr(_pollers, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(_pollers, "NOTICE_SECONDS", 0.3)
    monkeypatch.setattr(_pollers, "_AGAIN", 0.1)
    monkeypatch.setattr(_runs, "_AGAIN", 0.1)
    said = _pollers.Notice.say

    with ExitStack() as later:

        def say(self: _pollers.Notice, pollers: _pollers.Pollers) -> None:
            said(self, pollers)
            later.enter_context(temporal.working(ScriptedWorld()))
            monkeypatch.setattr(_pollers.Notice, "say", said)

        monkeypatch.setattr(_pollers.Notice, "say", say)
        answer = remote("pause", run_id)
    assert answer.exit_code == 0, answer.output
    assert answer.stderr.count("No worker is there to answer") == 1, answer.stderr
    assert "`relax-infer worker`" in answer.stderr
