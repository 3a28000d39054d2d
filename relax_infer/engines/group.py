"""One engine group from wherever an activity runs: its actors are found by name, or made."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
    WatchReport,
)
from relax_infer.contracts.failures import RelaxError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import StaleFence
from relax_infer.engines.evidence import write_evidence
from relax_infer.machines import ReplicaState

if TYPE_CHECKING:
    from relax_infer.engines.actor import Kind, ReplicaDescription, ReplicaOutcome

T = TypeVar("T")

ACTOR_SECONDS = 90.0
"""For an actor to be placed, started and to answer its first call."""
DYING_SECONDS = 5.0
"""For Ray to give up the name of an actor that was killed."""
READ_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""Between two looks at a healthy group."""
UNASKED_SECONDS = 20.0
"""Without an answer of its actor a replica counts as lost."""


class EngineGroup:
    """Operations on every replica of a group at once.

    The caller has done ``ray.init``. An operation is carried out once per operation id, however
    often it is asked for. A replica that fails does not raise: its report says ``FAILED`` and why,
    and what the others reached. Raises :class:`StaleFence` when every replica has seen a later or a
    rival token; then nothing was done. Where only some have, those are ``FAILED`` in the report.
    """

    def __init__(self, spec: EngineGroupSpec) -> None:
        self.spec = spec

    async def launch(self, op: EngineOperation) -> GroupReport:
        """Start every replica with its gate closed; a replica that runs is left alone."""
        return await self._operate("launch", op)

    async def onload(self, op: EngineOperation) -> GroupReport:
        """Launch what was never launched, wake what sleeps, load ``op.weights`` where another
        version is resident, read back, open. READY is reported only after all of it."""
        return await self._operate("onload", op)

    async def load_weights(self, op: EngineOperation) -> GroupReport:
        """Bring ``op.weights`` to replicas that are awake, behind a closed gate."""
        return await self._operate("load_weights", op)

    async def offload(self, op: EngineOperation) -> GroupReport:
        """Drain strictly and release; ``evidence`` is staged for the replicas that gave it."""
        return await self._operate("offload", op)

    async def stop(self, op: EngineOperation) -> GroupReport:
        """End every process, with proof, and the actors of the replicas that are proved gone."""
        report = await self._operate("stop", op)
        for replica in report.replicas:
            if replica.state is ReplicaState.DEAD and replica.error is None:
                await asyncio.to_thread(self._end_actor, replica.replica)
        return report

    async def probe(self) -> GroupReport:
        """Ask every replica; changes nothing. A replica of which nothing is on its host is DEAD."""

        async def ask(replica: int) -> ReplicaReport:
            actor = await self._actor(replica)
            return await _answer(actor.probe.remote(), READ_SECONDS)

        return GroupReport(replicas=await self._each(ask, self._unknown))

    async def forget(self, op: EngineOperation) -> GroupReport:
        """Take ``op.word`` (a person's) for the proof that failed replicas are gone."""
        return await self._operate("forget", op)

    async def watch(self, incarnations: Mapping[int, str]) -> WatchReport:
        """Return when a replica is not READY any more, or is another incarnation; not before.

        A replica whose actor has not answered for ``UNASKED_SECONDS`` counts as lost: its engine
        may live, so what follows must be a release proof.
        """
        clock = asyncio.get_running_loop().time
        answered = dict.fromkeys(incarnations, clock())

        async def look(replica: int, expected: str) -> ReplicaReport | None:
            try:
                report = await _answer(self._health(replica), UNASKED_SECONDS)
            except RelaxError as error:
                silent = clock() - answered[replica] >= UNASKED_SECONDS
                return self._unknown(replica, error) if silent else None
            answered[replica] = clock()
            ready = report.state is ReplicaState.READY and report.incarnation == expected
            return None if ready else report

        while True:
            looks = await asyncio.gather(*(look(k, v) for k, v in incarnations.items()))
            if lost := tuple(report for report in looks if report is not None):
                return WatchReport(lost=lost)
            await asyncio.sleep(LOOK_SECONDS)

    async def _health(self, replica: int) -> ReplicaReport:
        actor = await self._actor(replica)
        return await actor.health.remote()

    async def read_weights(self) -> GroupReport:
        """Version and digest as read from every engine just now; changes nothing."""

        async def ask(replica: int) -> ReplicaReport:
            actor = await self._actor(replica)
            return await _answer(actor.read_weights.remote(), self.spec.launch_timeout)

        return GroupReport(replicas=await self._each(ask, self._unknown))

    async def settle_requests(self, prefix: str) -> int:
        """Abort every request whose id begins with ``prefix``; their number, once all are gone.

        Raises:
            UnconfirmedError: an engine did not say so in time.
        """
        timeout = self.spec.drain_timeout

        async def ask(replica: int) -> int:
            actor = await self._actor(replica)
            return await _answer(actor.settle_requests.remote(prefix, timeout), timeout + 30)

        return sum(await asyncio.gather(*(ask(k) for k in range(self.spec.replicas))))

    async def describe(self) -> tuple["ReplicaDescription", ...]:
        """Where the replicas are on their hosts; those without an actor are left out."""

        async def ask(replica: int) -> "ReplicaDescription | None":
            actor = await asyncio.to_thread(self._find_actor, replica)
            if actor is None:
                return None
            return await _answer(actor.describe.remote(), READ_SECONDS)

        found = await asyncio.gather(*(ask(k) for k in range(self.spec.replicas)))
        return tuple(each for each in found if each is not None)

    async def _operate(self, kind: "Kind", op: EngineOperation) -> GroupReport:
        from relax_infer.engines.actor import ReplicaOutcome

        spec = self.spec
        limit = 2 * spec.launch_timeout + 3 * spec.drain_timeout + 60

        async def ask(replica: int) -> ReplicaOutcome:
            actor = await self._actor(replica)
            return await _answer(actor.operate.remote(kind, op), limit)

        def unknown(replica: int, error: RelaxError) -> ReplicaOutcome:
            return ReplicaOutcome(report=self._unknown(replica, error))

        outcomes = await self._each(ask, unknown, op.targets)
        stale = [outcome.stale for outcome in outcomes if outcome.stale is not None]
        if len(stale) == len(outcomes):
            raise StaleFence(op.fence, max(stale, key=lambda token: token.counter))
        given = [o.evidence for o in outcomes if o.evidence is not None]
        staged = None
        if given:
            staged = await asyncio.to_thread(write_evidence, spec, op.operation_id, given)
        return GroupReport(replicas=tuple(_told(o) for o in outcomes), evidence=staged)

    async def _each(
        self,
        ask: Callable[[int], Awaitable[T]],
        unknown: Callable[[int, RelaxError], T],
        replicas: Sequence[int] | None = None,
    ) -> tuple[T, ...]:
        """Ask every replica at once; one that cannot be asked is ``unknown``, not an error."""

        async def one(replica: int) -> T:
            try:
                return await ask(replica)
            except RelaxError as error:
                return unknown(replica, error)

        asked = range(self.spec.replicas) if replicas is None else replicas
        return tuple(await asyncio.gather(*(one(k) for k in asked)))

    def _unknown(self, replica: int, error: RelaxError) -> ReplicaReport:
        return ReplicaReport(
            replica=replica,
            engine_id=self.spec.engine_id(replica),
            state=ReplicaState.FAILED,
            error=f"{error.kind}: {error}",
        )

    async def _actor(self, replica: int) -> Any:
        """The replica's actor, made if there is none; it has answered once."""
        from ray.exceptions import RayActorError

        dying_until = asyncio.get_running_loop().time() + DYING_SECONDS
        while True:
            actor = await asyncio.to_thread(self._find_or_make_actor, replica)
            try:
                await asyncio.wait_for(actor.ping.remote(), ACTOR_SECONDS)
            except TimeoutError as error:
                raise TransientError(
                    f"Engine actor {self.spec.actor_name(replica)} did not answer within"
                    f" {ACTOR_SECONDS:.0f} s.",
                    cure="Its bundle may be full or its node down: look at `ray status`.",
                ) from error
            except RayActorError as error:
                # It was dying when it was found; nothing was asked of it yet.
                if asyncio.get_running_loop().time() > dying_until:
                    raise TransientError(
                        f"Engine actor {self.spec.actor_name(replica)} dies at its start: {error}"
                    ) from error
                await asyncio.sleep(0.1)
            else:
                return actor

    def _find_actor(self, replica: int) -> Any | None:
        import ray

        try:
            return ray.get_actor(self.spec.actor_name(replica), namespace=self.spec.namespace)
        except ValueError:
            return None

    def _find_or_make_actor(self, replica: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from relax_infer.engines.actor import EngineActor
        from relax_infer.placement import find_pool

        if (found := self._find_actor(replica)) is not None:
            return found
        spec = self.spec
        pool = find_pool(spec.run, spec.placement_group)
        if pool is None:
            raise UnconfirmedError(
                f"Run {spec.run} has no placement group {spec.placement_group}: its engines cannot"
                " be reached or looked for.",
                cure="If Ray was restarted, bring the run's pool up again; then probe.",
            )
        bundle = spec.bundles[replica * spec.gpus_per_replica].bundle
        return (
            ray.remote(EngineActor)
            .options(
                name=spec.actor_name(replica),
                namespace=spec.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                num_gpus=spec.ray_gpu_fraction,
                max_concurrency=64,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=pool, placement_group_bundle_index=bundle
                ),
            )
            .remote(spec, replica, pool.id.hex())
        )

    def _end_actor(self, replica: int) -> None:
        import ray

        actor = self._find_actor(replica)
        if actor is not None:
            ray.kill(actor)


def _told(outcome: "ReplicaOutcome") -> ReplicaReport:
    if outcome.stale is None:
        return outcome.report
    return outcome.report.model_copy(update={"state": ReplicaState.FAILED})


async def _answer(call: Awaitable[T], timeout: float) -> T:
    """A Ray reply with a deadline; without one, nobody knows what was done."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(call, timeout)
    except TimeoutError as error:
        raise UnconfirmedError(f"The engine's actor did not answer within {timeout:.0f} s.") from (
            error
        )
    except RayTaskError as error:
        cause = error.as_instanceof_cause()
        if isinstance(cause, RelaxError):
            raise cause from error
        raise UnconfirmedError(f"The engine's actor failed: {error}") from error
    except RayError as error:
        raise UnconfirmedError(
            f"The engine's actor is gone or cannot be reached: {error}",
            cure="Its server may still run; a probe makes a new actor that looks for it.",
        ) from error
