"""A worker's metrics: the Temporal SDK's, and what the open runs are like. Off unless asked for.

RELAX_METRICS_PORT serves ours, RELAX_SDK_METRICS_PORT the SDK's; both listen on RELAX_METRICS_HOST
(127.0.0.1). RELAX_METRICS_EVERY: seconds between two looks at the runs (15).
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, start_http_server
from temporalio.client import Client
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

from relax_infer.contracts.failures import PermanentError
from relax_infer.telemetry.run_metrics import RunMetrics
from workers._run_watch import RunWatch
from workers._variables import port_of

log = logging.getLogger(__name__)

_LOCAL = "127.0.0.1"
_EVERY = 15.0


def sdk_runtime(variables: Mapping[str, str] | None = None) -> Runtime | None:
    """The SDK's runtime with its metrics served; None: nobody asked, the default one is used.

    Raises:
        PermanentError: the port cannot be used.
    """
    given = os.environ if variables is None else variables
    port = port_of(given, "RELAX_SDK_METRICS_PORT")
    if port is None:
        return None
    address = f"{given.get('RELAX_METRICS_HOST', _LOCAL)}:{port}"
    config = PrometheusConfig(bind_address=address, durations_as_seconds=True, unit_suffix=False)
    try:
        return Runtime(telemetry=TelemetryConfig(metrics=config))
    except (RuntimeError, ValueError) as error:
        raise _unusable("RELAX_SDK_METRICS_PORT", address, error) from error


@asynccontextmanager
async def run_metrics(
    client: Client, variables: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Ours are served while the block runs, if somebody asked.

    Raises:
        PermanentError: the port cannot be used.
    """
    given = os.environ if variables is None else variables
    port = port_of(given, "RELAX_METRICS_PORT")
    if port is None:
        yield
        return
    host = given.get("RELAX_METRICS_HOST", _LOCAL)
    metrics, registry = RunMetrics(), CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise _unusable("RELAX_METRICS_PORT", f"{host}:{port}", error) from error
    log.info("metrics on http://%s:%d/metrics", host, port)
    every = float(given.get("RELAX_METRICS_EVERY", _EVERY))
    watching = asyncio.create_task(RunWatch(client, metrics, every=every).run())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def _unusable(name: str, address: str, error: Exception) -> PermanentError:
    return PermanentError(
        f"Metrics cannot be served on {address} ({name}): {error}.",
        cure=f"Set {name} to a free port, or leave it out.",
    )
