"""What a worker that is being stopped does with activities that would not end in time."""

import asyncio
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

WATCHES = frozenset({"watch_engines"})
"""They only look, for as long as a run lives, and are asked again wherever a worker is."""


class WatchesGiveWay(Interceptor):
    """A watch ends with its worker's first sign of ending, so that a drain waits for work alone."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _GivesWay(next)


class _GivesWay(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        if activity.info().activity_type not in WATCHES:
            return await super().execute_activity(input)
        watch = asyncio.ensure_future(super().execute_activity(input))
        ending = asyncio.ensure_future(activity.wait_for_worker_shutdown())
        try:
            await asyncio.wait((watch, ending), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                return watch.result()
            raise ApplicationError(
                "the worker is being stopped: another one goes on watching",
                type="Unconfirmed",
                non_retryable=False,
            )
        finally:
            watch.cancel()
            ending.cancel()
            await asyncio.gather(watch, ending, return_exceptions=True)
