"""The trainer group from wherever an activity runs: its actors are found by name, or made."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from relax_infer.contracts.failures import RelaxError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import StaleFence
from relax_infer.contracts.training import (
    TrainerOperation,
    TrainerReport,
    TrainerSpec,
    TrainerStatus,
    TrainRequest,
    TrainResult,
)
from relax_infer.training.residence import TrainerFiles

T = TypeVar("T")

ACTOR_SECONDS = 90.0
"""For an actor to be placed, started and to answer its first call."""
OPERATION_SECONDS = 600.0
"""For an onload, which may read a checkpoint, or an offload, which may wait for an update."""
READ_SECONDS = 30.0
TRAIN_SECONDS = 86_400.0
_POLL = 0.1
_CONTROL = 30.0
"""Seconds that Ray's own control plane may take to answer."""


class TrainerGroup:
    """The caller has done ``ray.init``. Raises from every method:

    - :class:`StaleFence`: the operation's token is older than one that was seen;
    - :class:`TransientError`: an actor could not be brought up; nothing was asked of it;
    - :class:`UnconfirmedError`: no answer; nobody knows what was done. Ask again with the same
      operation id or step;
    - :class:`PermanentError`: a person must change something.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec

    async def start(self) -> TrainerStatus:
        """The actors answer; nothing is on the GPUs yet. Idempotent."""
        return await self.status()

    async def onload(self, op: TrainerOperation) -> TrainerReport:
        """Resident: from the newest checkpoint if there is one, else from the model folder."""
        return await self._operate("onload", op)

    async def offload(self, op: TrainerOperation) -> TrainerReport:
        """Not on the GPUs any more; the report carries evidence of every rank."""
        return await self._operate("offload", op)

    async def settle(self, op: TrainerOperation) -> TrainerReport:
        """Where the trainer stands; one that holds nothing ends the token, with evidence. Makes an
        actor that is not there, which looks at what an earlier one left on the host."""
        return await self._operate("settle", op, READ_SECONDS)

    async def forget(self, op: TrainerOperation) -> TrainerReport | None:
        """Take a person's word that what cannot be asked is gone.

        None: no actor could be reached. If one lives on, it loads nothing more under the token:
        that is written where it looks before it loads.
        """
        for rank in range(self.spec.ranks):
            await asyncio.to_thread(TrainerFiles(self.spec, rank).closed.close, op.fence)
        try:
            (actor,) = await self._actors()
        except (RelaxError, TimeoutError):
            return None
        return await _answer(actor.forget.remote(op), OPERATION_SECONDS)

    async def train(self, request: TrainRequest) -> TrainResult:
        """One update from a committed partition, once; the ledger answers a repeat."""
        (actor,) = await self._actors()
        return await _answer(actor.train.remote(request), TRAIN_SECONDS)

    async def status(self) -> TrainerStatus:
        """Where the trainer stands, from its ledger and its actors. Changes nothing but makes an
        actor that is not there, which looks at what an earlier one left on the host."""
        (actor,) = await self._actors()
        return await _answer(actor.status.remote(), READ_SECONDS)

    async def stop(self, op: TrainerOperation) -> TrainerReport:
        """Offload, with its evidence, and end the actors."""
        import ray

        report = await self.offload(op)
        for actor in await self._actors():
            await _answer(actor.close.remote(), OPERATION_SECONDS)
            await asyncio.to_thread(ray.kill, actor)
        await self._gone()
        return report

    async def _operate(
        self, method: str, op: TrainerOperation, seconds: float = OPERATION_SECONDS
    ) -> TrainerReport:
        (actor,) = await self._actors()
        return await _answer(getattr(actor, method).remote(op), seconds)

    async def _actors(self) -> list[Any]:
        ranks = range(self.spec.ranks)
        return list(await asyncio.gather(*(self._actor(rank) for rank in ranks)))

    async def _actor(self, rank: int) -> Any:
        """The rank's actor, made if there is none; it has answered once."""
        from ray.exceptions import RayActorError

        name = self.spec.actor_name(rank)
        deadline = asyncio.get_running_loop().time() + ACTOR_SECONDS
        while True:
            actor = await asyncio.wait_for(
                asyncio.to_thread(self._find_or_make_actor, rank), _CONTROL
            )
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(actor.ping.remote(), max(_POLL, left))
            except TimeoutError as error:
                raise TransientError(
                    f"Trainer actor {name} did not answer within {ACTOR_SECONDS:.0f} s.",
                    cure="Its bundle may be full or its node down: look at `ray status`.",
                ) from error
            except RayActorError as error:
                # It was dying when it was found; nothing was asked of it yet.
                if left < 0:
                    raise TransientError(f"Trainer actor {name} dies at its start: {error}") from (
                        error
                    )
                await asyncio.sleep(_POLL)
            else:
                return actor

    def _find_actor(self, rank: int) -> Any | None:
        import ray

        try:
            return ray.get_actor(self.spec.actor_name(rank), namespace=self.spec.namespace)
        except ValueError:
            return None

    def _find_or_make_actor(self, rank: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from relax_infer.placement import find_pool
        from relax_infer.training.trainer import TrainerActor

        if (found := self._find_actor(rank)) is not None:
            return found
        spec = self.spec
        pool = find_pool(spec.run.run, spec.placement_group)
        if pool is None:
            raise UnconfirmedError(
                f"Run {spec.run.run} has no placement group {spec.placement_group}: its trainer"
                " cannot be reached or looked for.",
                cure="If Ray was restarted, bring the run's pool up again; then probe.",
            )
        return (
            ray.remote(TrainerActor)
            .options(
                name=spec.actor_name(rank),
                namespace=spec.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                num_gpus=spec.ray_gpu_fraction,
                max_concurrency=64,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=pool, placement_group_bundle_index=spec.bundles[rank].bundle
                ),
            )
            .remote(spec, rank)
        )

    async def _gone(self) -> None:
        deadline = asyncio.get_running_loop().time() + READ_SECONDS
        for rank in range(self.spec.ranks):
            while await asyncio.to_thread(self._find_actor, rank) is not None:
                if asyncio.get_running_loop().time() > deadline:
                    raise UnconfirmedError(
                        f"Trainer actor {self.spec.actor_name(rank)} is there {READ_SECONDS:.0f} s"
                        " after it was killed."
                    )
                await asyncio.sleep(_POLL)


async def _answer(call: Awaitable[T], timeout: float) -> T:
    """A Ray reply with a deadline; without one, nobody knows what was done."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, timeout)
    except TimeoutError as error:
        raise UnconfirmedError(f"The trainer did not answer within {timeout:.0f} s.") from error
    except RayTaskError as error:
        if isinstance(error.cause, RelaxError | StaleFence):
            raise error.cause from None
        raise UnconfirmedError(f"The trainer failed: {error}") from error
    except RayError as error:
        raise UnconfirmedError(
            f"The trainer's actor is gone or cannot be reached: {error}",
            cure="Ask again: a new actor goes on from the newest checkpoint.",
        ) from error
