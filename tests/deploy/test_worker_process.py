"""A worker under a supervisor: its probes, and how it ends."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from relax_infer.contracts.failures import PermanentError
from tests.gateway.fakes import free_port
from tests.workflows.scripted_world import until
from workers._drain import WATCHES
from workers._health import Health, health_server
from workers._variables import seconds_of

ROOT = Path(__file__).parents[2]
PROCESS = """
import asyncio, sys
from pathlib import Path
from temporalio import activity
from workers import worker

begun, go_on = Path(sys.argv[1]), Path(sys.argv[2])

async def work(name):
    begun.write_text(name)
    while not go_on.exists():
        await asyncio.sleep(0.05)
    return "done"

@activity.defn
async def stop_engines() -> str:
    return await work("stop_engines")

@activity.defn
async def watch_engines() -> str:
    return await work("watch_engines")

worker.ACTIVITIES = [stop_engines, watch_engines]
asyncio.run(worker.serve(["relax-engines"]))
"""


@workflow.defn
class Caller:
    @workflow.run
    async def run(self, name: str) -> str:
        return await workflow.execute_activity(
            name,
            task_queue="relax-engines",
            start_to_close_timeout=timedelta(seconds=60),
            heartbeat_timeout=timedelta(seconds=8),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=100)),
        )


class Place:
    """Files by which test and worker process tell each other how far they are."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.go_on = folder / "begun", folder / "go-on"


@asynccontextmanager
async def worker_process(
    client: Client, place: Place, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The worker's own ``serve`` in a process, without Ray."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        **variables,
    }
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROCESS, str(place.begun), str(place.go_on)),
        env=environment,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


@asynccontextmanager
async def calling(client: Client) -> AsyncIterator[str]:
    queue = f"callers-{uuid.uuid4().hex[:8]}"
    runner = UnsandboxedWorkflowRunner()
    async with Worker(client, task_queue=queue, workflows=[Caller], workflow_runner=runner):
        yield queue


async def answer(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, (await response.text()).strip()


async def answered(url: str) -> bool:
    try:
        return (await answer(url))[0] == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_that_is_asked_to_end_finishes_its_work_and_takes_no_more(
    temporal: Client, tmp_path: Path
):
    place, port = Place(tmp_path), free_port()
    variables = {"RELAX_HEALTH_PORT": str(port), "RELAX_DRAIN_SECONDS": "30"}
    url = f"http://127.0.0.1:{port}"
    async with calling(temporal) as queue, worker_process(temporal, place, **variables) as running:
        await until(lambda: answered(f"{url}/readyz"))
        assert await answer(f"{url}/healthz") == (200, "ok")
        first = await temporal.start_workflow(
            Caller.run, "stop_engines", id=f"first-{queue}", task_queue=queue
        )
        await until(place.begun.exists)
        running.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return await answer(f"{url}/readyz") == (503, "draining")

        await until(draining)
        assert await answer(f"{url}/healthz") == (200, "ok"), "it must not be killed for draining"
        place.begun.unlink()
        second = await temporal.start_workflow(
            Caller.run, "stop_engines", id=f"second-{queue}", task_queue=queue
        )
        place.go_on.touch()
        assert await first.result() == "done"
        assert await asyncio.wait_for(running.wait(), 30) == 0
        assert not place.begun.exists(), "what came later is for another worker"
        await second.terminate()


@pytest.mark.asyncio(loop_scope="session")
async def test_a_watch_gives_way_at_once_and_goes_on_in_another_worker(
    temporal: Client, tmp_path: Path
):
    place = Place(tmp_path)
    async with calling(temporal) as queue:
        async with worker_process(temporal, place, RELAX_DRAIN_SECONDS="50") as running:
            (watch,) = WATCHES
            handle = await temporal.start_workflow(
                Caller.run, watch, id=f"watch-{queue}", task_queue=queue
            )
            await until(place.begun.exists)
            running.send_signal(signal.SIGTERM)
            # Far less than it may drain: a watch that did not give way would take all of it.
            assert await asyncio.wait_for(running.wait(), 25) == 0
        place.begun.unlink()
        async with worker_process(temporal, place):
            await until(place.begun.exists)
            place.go_on.touch()
            assert await handle.result() == "done"


@pytest.mark.asyncio(loop_scope="session")
async def test_what_outlasts_the_drain_is_asked_of_another_worker(temporal: Client, tmp_path: Path):
    place = Place(tmp_path)
    async with calling(temporal) as queue:
        async with worker_process(temporal, place, RELAX_DRAIN_SECONDS="0.5") as running:
            handle = await temporal.start_workflow(
                Caller.run, "stop_engines", id=f"long-{queue}", task_queue=queue
            )
            await until(place.begun.exists)
            running.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(running.wait(), 25) == 0
        place.go_on.touch()
        async with worker_process(temporal, place):
            assert await handle.result() == "done"


class Queue:
    """What health asks a worker of the SDK."""

    def __init__(self, *, running: bool = True, over: bool = False) -> None:
        self.task_queue, self.is_running, self.is_shutdown = "relax", running, over


class Server:
    """A client whose server answers or does not."""

    def __init__(self, *, serving: bool) -> None:
        self.service_client, self._serving = self, serving

    async def check_health(self, **_: object) -> bool:
        return self._serving


@pytest.mark.parametrize(
    ("queue", "serving", "path", "wanted"),
    [
        (Queue(), True, "readyz", (200, "ok")),
        (Queue(), False, "readyz", (503, "the Temporal server does not serve")),
        (Queue(running=False), True, "readyz", (503, "not working on relax")),
        (Queue(running=False, over=True), True, "healthz", (503, "stopped on relax")),
        (Queue(running=False), True, "healthz", (200, "ok")),
    ],
)
async def test_a_probe_is_told_what_is_wrong(
    queue: Queue, serving: bool, path: str, wanted: tuple[int, str]
):
    port = free_port()
    health = Health(Server(serving=serving), [queue])  # type: ignore[arg-type, list-item]
    async with health_server(health, {"RELAX_HEALTH_PORT": str(port)}):
        assert await answer(f"http://127.0.0.1:{port}/{path}") == wanted


async def test_without_a_port_nobody_listens_and_a_taken_one_is_named():
    health = Health(Server(serving=True), [])  # type: ignore[arg-type]
    async with health_server(health, {}):
        pass
    port = free_port()
    given = {"RELAX_HEALTH_PORT": str(port)}
    async with health_server(health, given):
        with pytest.raises(PermanentError, match="RELAX_HEALTH_PORT"):
            async with health_server(health, given):
                pass


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_drain_that_is_no_number_of_seconds_is_refused_by_name(text: str):
    with pytest.raises(PermanentError, match="RELAX_DRAIN_SECONDS"):
        seconds_of({"RELAX_DRAIN_SECONDS": text}, "RELAX_DRAIN_SECONDS", 5.0)
