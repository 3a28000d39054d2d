"""The Temporal worker: ``python -m workers.worker [--queues relax relax-engines relax-train]``.

Address and namespace come from the standard Temporal environment configuration, the Ray cluster
from RAY_ADDRESS. Workflows run on the queue ``relax``.

SIGTERM or SIGINT: it takes no more work and ends once what it has at work is done, or after
RELAX_DRAIN_SECONDS (5); what is cut off is asked of another worker.
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
from workers._drain import WatchesGiveWay
from workers._health import Health, health_server
from workers._logs import configure_worker_logs
from workers._metrics import run_metrics, sdk_runtime
from workers._runner import FAILS_WORKFLOW, workflow_runner
from workers._tracing import StepTraces
from workers._variables import seconds_of
from workers._versions import deployment_of
from workflows import WORKFLOWS

log = logging.getLogger(__name__)

_GRACE = 5.0
"""Seconds for activities that are at work when the worker is asked to end."""
_IDLE = 0.5
"""Seconds that the SDK's threads may need after the last worker stopped."""


async def connect() -> Client:
    """A client by the standard Temporal environment configuration."""
    config = ClientConfig.load_client_connect_config()
    config.setdefault("target_host", "localhost:7233")
    runtime = sdk_runtime()
    return await Client.connect(**config, data_converter=data_converter(), runtime=runtime)


def make_worker(client: Client, queue: str, *, grace: float = _GRACE) -> Worker:
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
        interceptors=[
            ActivityBoundary(),
            WatchesGiveWay(),
            *([StepTraces()] if tracing() else []),
        ],
        max_concurrent_activities=64,
        max_cached_workflows=200,
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
        graceful_shutdown_timeout=timedelta(seconds=grace),
        deployment_config=deployment_of(os.environ),
    )


async def serve(queues: Sequence[str]) -> None:
    """Work until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    grace = seconds_of(os.environ, "RELAX_DRAIN_SECONDS", _GRACE)
    client = await connect()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(run_metrics(client))
        workers = [make_worker(client, queue, grace=grace) for queue in queues]
        health = Health(client, workers)
        await stack.enter_async_context(health_server(health))
        for worker in workers:
            await stack.enter_async_context(worker)
        log.info("working on %s", ", ".join(queues))
        await stop.wait()
        health.draining = True
        log.info("takes no more work; what is at work has %g s", grace)
        # All at once: a queue that waits for its turn would go on taking work.
        await asyncio.gather(*(worker.shutdown() for worker in workers))
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
