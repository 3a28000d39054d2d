"""The stack on real parts: up, killed in places, up again, down, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus

from relax_infer.contracts.policies import QUEUES
from tests.stack.conftest import marked, marked_home, record, until
from workers import _temporal
from workers.local import Stack, StackError, down, up

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CHECKOUT = Path(__file__).parents[2]
MEMORY = 1.0  # no engine runs here
ENGINE = """
import os, signal, sys, time
def asked(*_):
    alive = os.path.exists(f"/proc/{sys.argv[2]}")
    open(sys.argv[1], "w").write("asked while its actor lived" if alive else "asked too late")
    sys.exit()
signal.signal(signal.SIGTERM, asked)
open(sys.argv[1], "w").write("up")
while True:
    time.sleep(600)
"""
NewHome = Callable[[], Path]


@pytest.fixture
def local(new_home: NewHome) -> Stack:
    """A whole stack with its worker."""
    return up(new_home(), gpus=3, memory_gib=MEMORY)


def start_engine(stack: Stack, note: Path) -> int:
    """A detached actor with a child in a session of its own, as engines are; the child's pid."""
    import ray

    class Host:
        def start(self, note: str) -> int:
            variables = os.environ | {"RELAX_ENGINE_INCARNATION": "an-incarnation"}
            command = (sys.executable, "-c", ENGINE, note, str(os.getpid()))
            return subprocess.Popen(command, env=variables, start_new_session=True).pid

    with stack.joined_ray("relax-tests"):
        assert [node["Alive"] for node in ray.nodes()] == [True]
        assert ray.cluster_resources()["GPU"] == 3
        options = {"num_gpus": 1, "lifetime": "detached", "name": "host"}
        host = ray.remote(Host).options(**options).remote()
        pid = ray.get(host.start.remote(str(note)), timeout=60)
    until(lambda: note.exists() and note.read_text() == "up", 30, "the engine is up")
    return pid


async def leave_a_workflow(stack: Stack) -> None:
    """Nobody works on its queue, so it runs for as long as the server remembers it."""
    client = await Client.connect(stack.temporal_address)
    await client.start_workflow("Waiting", id="waiting", task_queue="nobody")


async def workflow_runs(stack: Stack) -> bool:
    client = await Client.connect(stack.temporal_address)
    description = await client.get_workflow_handle("waiting").describe()
    return description.status is WorkflowExecutionStatus.RUNNING


async def retention_days(stack: Stack) -> float:
    client = await Client.connect(stack.temporal_address)
    request = DescribeNamespaceRequest(namespace=stack.temporal_namespace)
    namespace = await client.workflow_service.describe_namespace(request)
    return namespace.config.workflow_execution_retention_ttl.ToTimedelta().days


def polled(stack: Stack) -> list[str]:
    pid, variables = stack.processes["worker"].pid, stack.environment()
    return [queue for queue in QUEUES if _temporal.polled_by(variables, queue, pid)]


def test_a_stack_comes_up_survives_kills_and_goes_down_whole(local: Stack, tmp_path: Path):
    assert local.missing() == ()
    assert polled(local) == list(QUEUES)
    assert asyncio.run(retention_days(local)) == 30
    asyncio.run(leave_a_workflow(local))
    note = tmp_path / "engine"
    engine = start_engine(local, note)
    assert engine in marked(local.stack)

    before = local.processes
    local.kill("temporal")
    assert not local.alive("temporal")
    local.start_temporal()
    assert asyncio.run(workflow_runs(local)), "the server forgot a workflow"
    local.kill("worker")
    assert local.missing() == ("worker",)
    # What a person would type: it starts what is missing and leaves the rest alone.
    again = up(local.home, memory_gib=MEMORY)
    assert again.missing() == ()
    assert (again.stack, again.temporal_address) == (local.stack, local.temporal_address)
    assert polled(again) == list(QUEUES)
    after = again.processes
    assert after["ray"] == before["ray"]
    assert after["worker"].stamp != before["worker"].stamp
    with pytest.raises(StackError, match="runs already"):
        again.start_worker()

    token = Path(str(record(local.home)["ray_token_file"]))
    assert token.stat().st_mode & 0o077 == 0
    report = down(local.home)
    assert report.ended == ("worker", f"engine {engine}", "ray", "temporal")
    assert report.left == ()
    assert marked(local.stack) == {}
    assert note.read_text() == "asked while its actor lived"
    assert not token.exists()
    assert not (local.home / "stack.json").exists()
    assert (local.home / "temporal.db").exists()

    later = up(local.home, worker=False, memory_gib=MEMORY)
    assert later.stack != local.stack
    assert asyncio.run(workflow_runs(later)), "the store did not outlive `down`"


def test_two_stacks_side_by_side_do_not_meet(new_home: NewHome):
    import ray

    one = up(new_home(), gpus=1, worker=False, memory_gib=MEMORY)
    other = up(new_home(), gpus=2, worker=False, memory_gib=MEMORY)
    addresses = [
        address
        for stack in (one, other)
        for address in (stack.temporal_address, stack.temporal_ui, stack.ray_address)
    ]
    assert len(set(addresses)) == 6
    asyncio.run(leave_a_workflow(one))
    for stack, gpus in ((one, 1), (other, 2)):
        with stack.joined_ray("relax-tests"):
            assert ray.cluster_resources()["GPU"] == gpus
    assert set(marked(one.stack)).isdisjoint(marked(other.stack))

    untouched = marked(other.stack)
    assert down(one.home).left == ()
    assert marked(one.stack) == {}
    assert untouched.keys() <= marked(other.stack).keys(), "`down` of one ended the other's"
    assert other.missing() == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(new_home: NewHome, number: signal.Signals):
    home = new_home()
    starting = start_up(home)
    stack = half_started(home)
    starting.send_signal(number)
    assert starting.wait(timeout=120) == 130
    assert marked(stack) == {}
    assert not (home / "stack.json").exists()


def test_what_a_killed_up_has_started_is_ended_by_down(new_home: NewHome):
    home = new_home()
    starting = start_up(home)
    stack = half_started(home)
    starting.kill()
    starting.wait(timeout=30)
    assert marked(stack), "the kill came too late to show anything"
    assert down(home).left == ()
    assert marked(stack) == {}


def test_up_ends_what_is_left_of_a_stack_whose_ray_is_gone(new_home: NewHome):
    home = new_home()
    first = up(home, worker=False, memory_gib=MEMORY)
    first.kill("ray")
    assert marked(first.stack), "nothing was left to end"
    second = up(home, worker=False, memory_gib=MEMORY)
    assert second.missing() == ()
    assert marked(first.stack) == {}


def test_a_part_that_does_not_start_is_told_by_its_log_and_leaves_nothing(new_home: NewHome):
    home = new_home()
    (home / "temporal.db").write_text("not a database, and long enough to be looked at" * 50)
    with pytest.raises(StackError, match=r"(?s)temporal ended while it started.*temporal\.log"):
        up(home, worker=False, memory_gib=MEMORY)
    assert (home / "logs" / "ray.log").exists(), "Ray was not started beside it"
    assert not (home / "stack.json").exists()
    assert not marked_home(home)


def start_up(home: Path) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "workers.local", "up", "--home", str(home))
    return subprocess.Popen(
        (*command, "--memory-gib", str(MEMORY)), cwd=CHECKOUT, stdout=subprocess.DEVNULL
    )


def half_started(home: Path) -> str:
    """Wait until servers run and ``up`` is not done; the stack's id."""

    def begun() -> bool:
        return (home / "stack.json").exists() and "ray" in record(home)["processes"]  # type: ignore[operator]

    until(begun, 60, "Temporal and Ray are being started")
    stack = str(record(home)["stack"])
    until(lambda: any("gcs_server" in each for each in marked(stack).values()), 60, "Ray's GCS")
    assert record(home)["ready"] is False
    return stack
