"""What a supervisor asks a worker: is it alive, and does it take work? Off unless asked for.

RELAX_HEALTH_PORT serves ``/healthz`` and ``/readyz`` on RELAX_HEALTH_HOST (127.0.0.1). Both are
answered by the loop that the work runs on: one that stands still answers nothing.
"""

import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from aiohttp import web
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from relax_infer.contracts.failures import PermanentError
from workers._variables import port_of

log = logging.getLogger(__name__)

_LOCAL = "127.0.0.1"
_ASKING = timedelta(seconds=3)


class Health:
    """Of the workers of this process, one for each queue."""

    def __init__(self, client: Client, workers: Sequence[Worker]) -> None:
        self._client, self._workers = client, workers
        self.draining = False

    async def alive(self, _: web.Request) -> web.Response:
        """200, also while it drains: only a new process would help against a 503."""
        stopped = [w.task_queue for w in self._workers if w.is_shutdown and not self.draining]
        return _answer(f"stopped on {', '.join(stopped)}" if stopped else None)

    async def ready(self, _: web.Request) -> web.Response:
        """200 while it takes work and the Temporal server answers it."""
        return _answer(await self._why_not())

    async def _why_not(self) -> str | None:
        if self.draining:
            return "draining"
        if idle := [w.task_queue for w in self._workers if not w.is_running]:
            return f"not working on {', '.join(idle)}"
        try:
            serving = await self._client.service_client.check_health(timeout=_ASKING)
        except RPCError as error:
            return f"the Temporal server does not answer: {error.status.name}"
        return None if serving else "the Temporal server does not serve"


@asynccontextmanager
async def health_server(
    health: Health, variables: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Served while the block runs, if somebody asked.

    Raises:
        PermanentError: the port cannot be used.
    """
    given = os.environ if variables is None else variables
    port = port_of(given, "RELAX_HEALTH_PORT")
    if port is None:
        yield
        return
    host = given.get("RELAX_HEALTH_HOST", _LOCAL)
    app = web.Application()
    app.router.add_get("/healthz", health.alive)
    app.router.add_get("/readyz", health.ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise PermanentError(
                f"Health cannot be served on {host}:{port} (RELAX_HEALTH_PORT): {error}.",
                cure="Set RELAX_HEALTH_PORT to a free port, or leave it out.",
            ) from error
        log.info("health on http://%s:%d/healthz", host, port)
        yield
    finally:
        await runner.cleanup()


def _answer(trouble: str | None) -> web.Response:
    return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")
