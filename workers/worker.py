"""The Temporal worker: ``python -m workers.worker [--queues relax relax-engines relax-train]``.

Address and namespace come from the standard Temporal environment configuration, the Ray cluster
from RAY_ADDRESS. Workflows run on the queue ``relax``.
"""

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta

from temporalio.client import Client
from temporalio.envconfig import ClientConfig
from temporalio.worker import Worker

from activities._boundary import ActivityBoundary
from activities.registry import ACTIVITIES
from relax_infer.contracts.policies import POLICIES, QUEUES
from relax_infer.telemetry.traces import configure_traces, end_traces, tracing
from workers._converter import data_converter
from workers._logs import configure_worker_logs
from workers._metrics import run_metrics, sdk_runtime
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._tracing import StepTraces
from workflows import WORKFLOWS

_IDLE = 0.5
"""Seconds that the SDK's threads may need after the last worker stopped."""


async def connect() -> Client:
    """A client by the standard Temporal environment configuration."""
    config = ClientConfig.load_client_connect_config()
    config.setdefault("target_host", "localhost:7233")
    runtime = sdk_runtime()
    return await Client.connect(**config, data_converter=data_converter(), runtime=runtime)


def make_worker(client: Client, queue: str, *, grace: float = 5.0) -> Worker:
    """A worker for one queue, with the activities whose policy names it."""
    names = {name for name, policy in POLICIES.items() if policy.queue == queue}
    activities = [a for a in ACTIVITIES if a.__name__ in names]
    return Worker(
        client,
        task_queue=queue,
        workflows=WORKFLOWS if queue == "relax" else [],
        activities=activities,
        workflow_runner=workflow_runner(),
        workflow_failure_exception_types=FAILS_WORKFLOW,
        interceptors=[ActivityBoundary(), *([StepTraces()] if tracing() else [])],
        max_concurrent_activities=64,
        max_cached_workflows=200,
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
        graceful_shutdown_timeout=timedelta(seconds=grace),
    )


async def serve(queues: Sequence[str]) -> None:
    """Work until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = await connect()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(run_metrics(client))
        for queue in queues:
            await stack.enter_async_context(make_worker(client, queue))
        logging.getLogger(__name__).info("working on %s", ", ".join(queues))
        await stop.wait()
    await asyncio.sleep(_IDLE)


def connect_ray() -> None:
    """Join the cluster of RAY_ADDRESS. Everything we make there is detached and outlives us."""
    import ray

    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        namespace="relax",
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queues", nargs="+", choices=QUEUES, default=QUEUES)
    arguments = parser.parse_args()
    configure_worker_logs()
    configure_traces("relax-worker")
    connect_ray()
    try:
        asyncio.run(serve(arguments.queues))
    finally:
        end_traces()


if __name__ == "__main__":
    main()
