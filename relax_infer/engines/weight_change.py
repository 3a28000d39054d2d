"""New weights into the memory of an engine that runs: begin, bucket after bucket, end.

From the first call to the last the engine names its weights ``changing``; its gate is closed, and
the replica does not count any weights as resident. Every call carries the fence token.
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.weights import WeightTransport
from relax_infer.engines.control import EngineControl
from relax_infer.engines.host_tensors import SentDigest, cut, host_tensors
from relax_infer.engines.seats import Place
from relax_infer.engines.shared_bucket import SharedBucket

_ABANDON_SECONDS = 60.0
"""For an engine to end a change that failed; one that hangs in it is stopped, with proof."""


class WeightChange:
    """One attempt at one engine, with a deadline. Any error leaves the weights unknown."""

    def __init__(self, control: EngineControl, token: FenceToken, seconds: float) -> None:
        self._control, self._token = control, token
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._memory = SharedBucket()

    async def from_tensors(
        self, folder: Path, weights: WeightsRef, transport: WeightTransport, ranks: int
    ) -> None:
        """Read the folder here and hand its tensors over in shared memory.

        Args:
            ranks: of the engine; all of them are on this host.

        Raises:
            PermanentError: the engine refused, or the folder holds other weights than published.
            UnconfirmedError: no answer, or not in time.
        """
        buckets = await asyncio.to_thread(lambda: cut(host_tensors(folder), transport.bucket_bytes))
        memory, sent = self._memory, SentDigest()
        await self._begin()
        for bucket in buckets:
            await asyncio.to_thread(memory.fill, bucket)
            handles = memory.handles(bucket, ranks)
            loading = self._control.update_from_tensors(handles, self._token, self._left())
            await asyncio.gather(loading, asyncio.to_thread(sent.add, bucket))
            memory.opened()
        memory.close()
        sent.check(weights.digest, folder)
        await self._end(weights.version)

    async def from_group(self, place: Place, weights: WeightsRef) -> None:
        """Join the sender's group with every rank and take what it broadcasts; the group is left on
        every end. Raises as :meth:`from_tensors`."""
        seat = await place.take(weights)
        # The wait for the other engines was not of this one's time.
        self._deadline = time.monotonic() + self._seconds
        control, token = self._control, self._token
        try:
            await control.join_group(seat, place.backend, token, self._left())
            await self._begin()
            for bucket in seat.buckets:
                await control.update_from_group(seat, bucket, token, self._left())
            await place.leave()
        except BaseException as error:
            # The sender ends the group then, which frees ranks that wait in it.
            await place.give_up(str(error) or type(error).__name__)
            raise
        finally:
            with suppress(PermanentError, UnconfirmedError):
                await control.leave_group(seat, token, _ABANDON_SECONDS)
        await self._end(weights.version)

    async def abandon(self) -> None:
        """After an error: the engine answers and takes another load.

        Raises:
            UnconfirmedError: it does not; nobody may load into it or open it.
        """
        try:
            with suppress(PermanentError):  # none was open
                await self._control.end_update(self._token, _ABANDON_SECONDS)
        finally:
            # Not before: a bucket that it had not come to would have been gone.
            self._memory.close()

    async def _begin(self) -> None:
        await self._control.name_weights(None, self._token, self._left())
        await self._control.begin_update(self._token, self._left())

    async def _end(self, version: int) -> None:
        control, token = self._control, self._token
        await control.end_update(token, self._left())
        if not await control.flush_cache():
            raise UnconfirmedError(f"The engine at {control.socket} kept its cache: it is busy.")
        await control.name_weights(version, token, self._left())

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise UnconfirmedError(
                f"The engine at {self._control.socket} has not got its weights in"
                f" {self._seconds:g} s.",
                cure="Raise train.weights.timeout if that was too little.",
            )
        return left
