"""The Temporal SDK serves the metrics that the table says it does."""

import asyncio
import socket
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from relax_infer.telemetry.catalogue import METRICS
from workers._metrics import sdk_runtime


@activity.defn
async def fails_once() -> None:
    if activity.info().attempt == 1:
        raise RuntimeError("the first attempt")


@workflow.defn
class Metered:
    @workflow.run
    async def run(self) -> None:
        from datetime import timedelta

        await workflow.execute_activity(fails_once, start_to_close_timeout=timedelta(seconds=20))


@workflow.defn
class NotDeterministic:
    @workflow.run
    async def run(self) -> None:
        raise RuntimeError("a fault of the code, not of the workflow")


async def test_the_sdks_metrics_are_named_as_in_the_table():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    runtime = sdk_runtime({"RELAX_SDK_METRICS_PORT": str(port)})
    program = str(Path(sys.executable).parent / "temporal")
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=program) as server:
        address = server.client.service_client.config.target_host
        client = await Client.connect(address, runtime=runtime)
        worker = Worker(
            client,
            task_queue="metered",
            workflows=[Metered, NotDeterministic],
            activities=[fails_once],
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        async with worker:
            await client.execute_workflow(Metered.run, id="metered", task_queue="metered")
            faulty = await client.start_workflow(
                NotDeterministic.run, id="faulty", task_queue="metered"
            )
            wanted = {spec.name for spec in METRICS.values() if spec.part == "sdk"}
            served: dict[str, set[str]] = {}
            async with asyncio.timeout(60):
                while wanted - served.keys():
                    served = await asyncio.to_thread(read, port)
                    await asyncio.sleep(0.05)
            await faulty.terminate()
    for name in wanted:
        assert set(METRICS[name].labels) <= served[name], (name, served[name])


def read(port: int) -> dict[str, set[str]]:
    """Labels of each family."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {f.name: {key for s in f.samples for key in s.labels} for f in families if f.samples}
