"""Whether a worker asks Temporal for work, and what is said once while nobody does."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, timedelta
from pathlib import Path
from types import TracebackType

import typer
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import PollerInfo, TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError

from relax_infer.cli._errors import CommandError
from relax_infer.cli._home import read_stack

QUEUE = "relax"
"""Of workflows and light activities."""
FRESH_SECONDS = 75.0
"""A worker without work asks once a minute; Temporal remembers one that is gone for five."""
NOTICE_SECONDS = 10.0
_AGAIN = 5.0
_CALL = timedelta(seconds=10)
CURE = "`relax-infer up` starts a local stack's worker again, `relax-infer worker` one more."


@dataclass(frozen=True)
class Pollers:
    """Who asked for work on one queue."""

    queue: str
    heard: float | None
    """Seconds since anybody did who may live still; None: nobody did for minutes."""
    ended: tuple[int, ...] = ()
    """Pids of the local stack's own worker, if it has ended and Temporal has it in mind still."""

    @property
    def asking(self) -> bool:
        """Whether a worker is there, as far as can be told."""
        return self.heard is not None and self.heard < FRESH_SECONDS

    @property
    def remembered(self) -> bool:
        """Whether Temporal knows of any worker, also of one that is gone."""
        return self.heard is not None or bool(self.ended)

    def __str__(self) -> str:
        if self.asking:
            return f"asks for work on {self.queue}"
        if self.ended:
            return f"none asks for work on {self.queue}: process {self.ended[0]} has ended"
        if self.heard is not None:
            return f"none has asked for work on {self.queue} for {self.heard:.0f} s"
        return f"none asks for work on {self.queue}"


async def pollers_of(client: Client, home: Path | None, queue: str = QUEUE) -> Pollers:
    """
    Args:
        home: of the local stack that the server belongs to; None: of any other. The clocks of this
            machine and of another server are taken to agree within seconds.

    Raises:
        RPCError: Temporal does not say.
    """
    kind = (
        TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW
        if queue == QUEUE
        else TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY
    )
    described = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=client.namespace,
            task_queue=TaskQueue(name=queue),
            task_queue_type=kind,
        ),
        timeout=_CALL,
    )
    return read_pollers(queue, described.pollers, _ended_workers(home), time.time())


def read_pollers(
    queue: str, listed: Sequence[PollerInfo], ended: Sequence[int], now: float
) -> Pollers:
    """What Temporal's list says at ``now`` (Unix seconds), where the processes ``ended`` are
    gone."""
    gone = {pid for pid in ended if any(_is(poller, pid) for poller in listed)}
    left = [poller for poller in listed if not any(_is(poller, pid) for pid in gone)]
    times = [poller.last_access_time.ToDatetime(UTC).timestamp() for poller in left]
    heard = max(0.0, now - max(times)) if times else None
    return Pollers(queue, heard, tuple(sorted(gone)))


def _is(poller: PollerInfo, pid: int) -> bool:
    """Workers call themselves PID@HOST."""
    return poller.identity.startswith(f"{pid}@")


def _ended_workers(home: Path | None) -> tuple[int, ...]:
    """Of the local stack; a worker that somebody else started is in no record."""
    with suppress(CommandError):
        stack = read_stack(home) if home is not None else None
        if stack is not None and "worker" in stack.dead:
            return (stack.processes["worker"]["pid"],)
    return ()


class Notice:
    """While something is waited for: says, once and not before :data:`NOTICE_SECONDS`, that no
    worker asks for work, and the cure. ``async with``; the waiting goes on."""

    def __init__(self, client: Client, home: Path | None) -> None:
        self._client, self._home = client, home
        self._said = False
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Notice":
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._looking is not None
        self._looking.cancel()
        await asyncio.wait([self._looking])

    def say(self, pollers: Pollers) -> None:
        """Nobody is there; a repeat is silent."""
        if not self._said:
            self._said = True
            typer.echo(
                f"No worker is there to answer: {pollers}. {CURE} Waits on (Ctrl-C gives up).",
                err=True,
            )

    async def _look(self) -> None:
        await asyncio.sleep(NOTICE_SECONDS)
        while not self._said:
            with suppress(RPCError):  # the call that is waited for says what is wrong
                if not (pollers := await pollers_of(self._client, self._home)).asking:
                    self.say(pollers)
            await asyncio.sleep(_AGAIN)
