"""An engine's place in the process group through which the trainer sends new weights."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from relax_infer.contracts.engines import EngineGroupSpec, EngineOperation
from relax_infer.contracts.failures import RelaxError, UnconfirmedError
from relax_infer.contracts.fence import StaleFence
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.training import trainer_actor_name
from relax_infer.contracts.weights import Seat, SeatAsk
from relax_infer.engines.actors import answer

_PATIENCE = 10.0
"""Seconds beyond the drain's deadline in which every engine must have asked for its seat."""
_READ_SECONDS = 30.0


class Sender(Protocol):
    """What sends weights to a group: trainer rank 0, or a double of it."""

    async def take_seat(self, ask: SeatAsk) -> Seat:
        """Answers when every member has asked or declined, or its patience has ended."""
        ...

    async def leave_seat(
        self, key: str, member: str, members: Sequence[str], error: str | None
    ) -> None:
        """A member has got everything, or failed, or will not come. Raises
        :class:`UnconfirmedError` in the first case if not everything was sent."""
        ...


class TrainerSender:
    """Rank 0 of the run's trainer, over Ray."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def take_seat(self, ask: SeatAsk) -> Seat:
        actor = await asyncio.to_thread(self._actor)
        return await answer(actor.take_seat.remote(ask), ask.patience + _READ_SECONDS)

    async def leave_seat(
        self, key: str, member: str, members: Sequence[str], error: str | None
    ) -> None:
        actor = await asyncio.to_thread(self._actor)
        call = actor.leave_seat.remote(key, member, tuple(members), error)
        await answer(call, _READ_SECONDS)

    def _actor(self) -> Any:
        import ray

        try:
            return ray.get_actor(trainer_actor_name(0), namespace=self._namespace)
        except ValueError as error:
            raise UnconfirmedError("The trainer has no actor that could send weights.") from error


class Place:
    """What one operation does with an engine's seat. A place that is not taken is given up, so that
    nobody waits for it."""

    def __init__(
        self, spec: EngineGroupSpec, replica: int, op: EngineOperation, sender: Sender
    ) -> None:
        self._spec, self._op, self._sender = spec, op, sender
        self._member = spec.engine_id(replica)
        self._members = tuple(spec.engine_id(k) for k in op.targets)
        self._over = spec.weights.transport != "process_group" or op.weights is None
        self._taken = False

    @property
    def backend(self) -> Literal["gloo", "nccl"]:
        return "gloo" if self._spec.device == "cpu" else "nccl"

    async def take(self, weights: WeightsRef) -> Seat:
        """Raises :class:`UnconfirmedError`: there is no sender, or no group came about."""
        spec, op = self._spec, self._op
        self._taken = True
        return await self._sender.take_seat(
            SeatAsk(
                key=op.operation_id,
                fence=op.fence,
                weights=weights,
                member=self._member,
                ranks=spec.gpus_per_replica,
                members=self._members,
                backend=self.backend,
                bucket_bytes=spec.weights.bucket_bytes,
                patience=spec.weights.drain_deadline + spec.drain_timeout + _PATIENCE,
                timeout=spec.weights.timeout,
            )
        )

    async def leave(self) -> None:
        """Everything came. Raises :class:`UnconfirmedError`: not as it was sent."""
        await self._tell(None)
        self._over = True

    async def give_up(self, why: str) -> None:
        """It failed, or never needed its seat; nothing where that was told or nobody waits."""
        alone = not self._taken and len(self._members) == 1
        if not self._over and not alone:
            self._over = True
            with suppress(RelaxError, StaleFence):  # a sender that is gone waits for nobody
                await self._tell(why)

    async def _tell(self, error: str | None) -> None:
        key = self._op.operation_id
        await self._sender.leave_seat(key, self._member, self._members, error)
