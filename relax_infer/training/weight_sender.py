"""Rank 0's part in sending weights: it seats the engines that come, makes one group of them, sends,
and takes the group down on every end.

The weights are read from the exported folder on this host, so that they are those that were
published, whatever is on the trainer's devices by now, and an attempt after a crash sends the same.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory
from relax_infer.contracts.weights import Seat, SeatAsk
from relax_infer.engines.host_tensors import Bucket, OtherWeights, SentDigest, cut, host_tensors
from relax_infer.engines.process import local_path

log = logging.getLogger(__name__)

_REMEMBERED = 8
"""Operations of the past under which nobody is seated again."""


class Group(Protocol):
    """Rank 0 of a process group; see :class:`relax_infer.training.torch_group.TorchGroup`."""

    name: str
    port: int

    def join(self) -> None: ...
    def send(self, bucket: Bucket) -> None: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...


MakeGroup = Callable[[SeatAsk, int], Group]
"""From one member's ask and the number of ranks."""


@dataclass
class _Table:
    """The engines of one operation."""

    members: frozenset[str]
    asks: dict[str, SeatAsk] = field(default_factory=dict[str, SeatAsk])
    left: set[str] = field(default_factory=set[str])
    seats: "asyncio.Task[dict[str, Seat]] | None" = None
    everyone: asyncio.Event = field(default_factory=asyncio.Event)
    group: Group | None = None
    sending: "asyncio.Task[None] | None" = None

    @property
    def over(self) -> bool:
        """Nobody waits at it, and nothing is sent."""
        if self.seats is None:
            return not self.asks
        return self.seats.done() and (self.sending is None or self.sending.done())

    def look(self) -> None:
        if self.members <= self.asks.keys() | self.left:
            self.everyone.set()


class WeightSender:
    """Not thread-safe: belongs to one event loop."""

    def __init__(self, host: str, make: MakeGroup) -> None:
        """``host``: at which the engines' hosts reach this one."""
        self._host, self._make = host, make
        self._tables: dict[str, _Table] = {}
        self._fence = FenceMemory()

    async def take_seat(self, ask: SeatAsk) -> Seat:
        """The member's seat, when all members have asked or left, or the patience of the first has
        ended: then the group is made of those that came.

        Raises:
            StaleFence: the engines were granted to somebody else since.
            PermanentError: the weights are not on this host, or cannot be sent.
            UnconfirmedError: the member comes too late, or a second time.
        """
        self._fence.admit(ask.fence, loads=True)
        table = self._table(ask.key, ask.members)
        if table.seats is not None or ask.member in table.asks:
            raise UnconfirmedError(f"{ask.member} has no seat: the group of {ask.key} is made.")
        table.asks[ask.member] = ask
        table.look()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(table.everyone.wait(), ask.patience)
        if table.seats is None:
            table.seats = asyncio.create_task(self._seat(table))
        return (await asyncio.shield(table.seats))[ask.member]

    async def leave_seat(
        self, key: str, member: str, members: Sequence[str], error: str | None
    ) -> None:
        """A member has got everything (no error), has failed, or will not come.

        Raises:
            OtherWeights: it has got everything, and that is not what was published.
            UnconfirmedError: it has got everything, and that was not all.
        """
        table = self._table(key, members)
        table.left.add(member)
        table.look()
        sending = table.sending
        if sending is None:
            if error is None:
                raise UnconfirmedError(f"Nothing was sent to {member} under {key}.")
            return
        if error is not None and member in table.asks and table.group is not None:
            table.group.abort(f"{member}: {error}")
            return
        await asyncio.wait([sending])
        failure = sending.exception()
        if isinstance(failure, OtherWeights):
            raise failure
        if failure is not None:
            raise UnconfirmedError(f"The weights were not sent whole: {failure}") from failure

    def _table(self, key: str, members: Sequence[str]) -> _Table:
        if key not in self._tables:
            self._tables[key] = _Table(frozenset(members))
            over = [k for k, table in self._tables.items() if table.over]
            for oldest in over[: max(0, len(self._tables) - _REMEMBERED)]:
                if oldest != key:
                    del self._tables[oldest]
        return self._tables[key]

    async def _seat(self, table: _Table) -> dict[str, Seat]:
        asks = list(table.asks.values())
        first = asks[0]
        folder = local_path(first.weights.uri)
        if folder is None:
            raise PermanentError(f"Weights at {first.weights.uri} are in no folder of this host.")
        limit = first.bucket_bytes
        buckets = await asyncio.to_thread(lambda: cut(host_tensors(folder), limit))
        world = 1 + sum(ask.ranks for ask in asks)
        group = table.group = await asyncio.to_thread(self._make, first, world)
        plans = tuple(tuple(tensor.plan for tensor in bucket) for bucket in buckets)
        seats: dict[str, Seat] = {}
        offset = 1
        for ask in asks:
            seats[ask.member] = Seat(
                host=self._host,
                port=group.port,
                group=group.name,
                world=world,
                rank_offset=offset,
                buckets=plans,
            )
            offset += ask.ranks
        table.sending = asyncio.create_task(self._send(group, buckets, folder, first))
        # Nobody may be left to hear of it.
        table.sending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return seats

    async def _send(self, group: Group, buckets: list[Bucket], folder: Path, ask: SeatAsk) -> None:
        version = ask.weights.version

        def send() -> None:
            sent = SentDigest()
            try:
                group.join()
                for bucket in buckets:
                    group.send(bucket)
                    sent.add(bucket)
                sent.check(ask.weights.digest, folder)
            finally:
                group.close()

        # Its own thread: one that waits for a dead rank must not hold up others.
        with contextlib.closing(_OneThread()) as thread:
            try:
                await asyncio.get_running_loop().run_in_executor(thread.pool, send)
            except Exception as error:
                log.warning("weights %d were not sent whole: %s", version, error)
                raise
        log.info("weights %d were sent", version, extra={"group": group.name})


class _OneThread:
    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def close(self) -> None:
        self.pool.shutdown(wait=False)
