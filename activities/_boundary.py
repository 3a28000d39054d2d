"""What every activity has in common: heartbeats, and failures that say which kind they are."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

from activities._progress import told
from activities._subject import subject_of
from relax_infer.contracts.failures import RelaxError, TransientError
from relax_infer.contracts.faults import explain
from relax_infer.contracts.fence import StaleFence
from relax_infer.telemetry import about

log = logging.getLogger(__name__)

_BEAT = 1.0
"""Seconds between heartbeats; the shortest heartbeat timeout in the table is eight of them."""


class ActivityBoundary(Interceptor):
    """Heartbeats while an activity runs and carries the kind of its failure to the workflow."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Boundary(next)


class _Boundary(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        with about(**subject_of(activity.info(), input.args)):
            return await self._told(input)

    async def _told(self, input: ExecuteActivityInput) -> Any:
        """With a line when it has ended; what it failed with the SDK itself tells."""
        name, began = activity.info().activity_type, time.monotonic()
        result = await self._in_kind(input)
        log.info("%s is done", name, extra={"seconds": round(time.monotonic() - began, 3)})
        return result

    async def _in_kind(self, input: ExecuteActivityInput) -> Any:
        try:
            async with _beating():
                return await super().execute_activity(input)
        except RelaxError as error:
            raise ApplicationError(
                str(error), type=error.kind, non_retryable=error.kind != TransientError.kind
            ) from error
        except ValidationError as error:
            text = f"{error.title}: {explain(error)}"
            raise ApplicationError(text, type="Permanent", non_retryable=True) from error
        except StaleFence as error:
            raise ApplicationError(str(error), type="Permanent", non_retryable=True) from error
        except asyncio.CancelledError:
            if not activity.is_worker_shutdown():
                raise
            raise ApplicationError(
                "the worker was stopped while this ran", type="Unconfirmed", non_retryable=False
            ) from None


@asynccontextmanager
async def _beating() -> AsyncIterator[None]:
    """Every beat carries what the activity told last: a later one without it would take it back."""

    async def beat() -> None:
        while True:
            activity.heartbeat(*details)
            await asyncio.sleep(_BEAT)

    with told() as details:
        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
