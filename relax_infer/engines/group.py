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
from relax_infer.engines.actors import (
    answer,
    end_actors,
    find_actor,
    living_heads,
    node_actor,
)
from relax_infer.engines.closed_grants import closed_grants
from relax_infer.engines.evidence import write_evidence
from relax_infer.engines.static import InferenceEngineSpec
from relax_infer.machines import ReplicaState

if TYPE_CHECKING:
    from relax_infer.engines.actor import Kind, ReplicaDescription, ReplicaOutcome

T = TypeVar("T")

READ_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""Between two looks at a healthy group."""
IDLE_SECONDS = 0.1
"""Between two looks at an engine that finishes its requests."""
LOAD_SECONDS = 5.0
"""For an answer that is worth something only at once."""
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
                await asyncio.to_thread(end_actors, self.spec, replica.replica)
        return report

    async def probe(self) -> GroupReport:
        """Ask every replica; changes nothing. A replica of which nothing is on its host is DEAD."""

        async def ask(replica: int) -> ReplicaReport:
            actor = await node_actor(self.spec, replica)
            return await answer(actor.probe.remote(), READ_SECONDS)

        return GroupReport(replicas=await self._each(ask, self._unknown))

    async def forget(self, op: EngineOperation) -> GroupReport:
        """Take ``op.word`` (a person's) for the proof that failed replicas are gone.

        One that does not answer is FAILED and Unconfirmed in the report; should it live, it loads
        nothing more under the token: that is written where it looks before it loads.
        """
        for replica in op.targets:
            await asyncio.to_thread(closed_grants(self.spec, replica).close, op.fence)
        report = await self._operate("forget", op)
        for told in report.replicas:
            if not (told.error or "").startswith(UnconfirmedError.kind):
                await asyncio.to_thread(closed_grants(self.spec, told.replica).reopen, op.fence)
        return report

    async def watch(self, incarnations: Mapping[int, str]) -> WatchReport:
        """Return when a replica is not READY any more, or is another incarnation; not before.

        A replica whose actor has not answered for ``UNASKED_SECONDS`` counts as lost: its engine
        may live, so what follows must be a release proof.
        """
        clock = asyncio.get_running_loop().time
        answered = dict.fromkeys(incarnations, clock())

        async def look(replica: int, expected: str) -> ReplicaReport | None:
            try:
                report = await answer(self._health(replica), UNASKED_SECONDS)
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
        actor = await node_actor(self.spec, replica)
        return await actor.health.remote()

    async def read_weights(self) -> GroupReport:
        """Version and digest as read from every engine just now; changes nothing."""

        async def ask(replica: int) -> ReplicaReport:
            actor = await node_actor(self.spec, replica)
            return await answer(actor.read_weights.remote(), self.spec.launch_timeout)

        return GroupReport(replicas=await self._each(ask, self._unknown))

    async def settle_requests(self, prefix: str) -> int:
        """Abort every request whose id begins with ``prefix``; their number, once all are gone.

        Replicas that were added since the spec was written down are asked, too.

        Raises:
            UnconfirmedError: an engine did not say so in time.
        """
        timeout, numbers = self.spec.drain_timeout, self.spec.numbers

        async def ask(actor: Any) -> int:
            return await answer(actor.settle_requests.remote(prefix, timeout), timeout + 30)

        known = await asyncio.gather(*(node_actor(self.spec, k) for k in numbers))
        heads = await asyncio.to_thread(living_heads, self.spec)
        added = [actor for k, actor in sorted(heads.items()) if k not in numbers]
        return sum(await asyncio.gather(*(ask(actor) for actor in (*known, *added))))

    async def wait_idle(self, replica: int, timeout: float) -> int:
        """Requests that are left in a replica which nobody calls any more; 0 as soon as none is,
        else after ``timeout`` seconds. Its gate stays open: what was admitted ends well.

        Raises:
            UnconfirmedError: it does not say.
        """
        actor = await node_actor(self.spec, replica)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while left := await answer(actor.in_flight.remote(), READ_SECONDS):
            if clock() >= deadline:
                break
            await asyncio.sleep(IDLE_SECONDS)
        return left

    async def in_flight(self) -> tuple[int, ...]:
        """Requests that each replica has admitted and not answered; one that does not say is left
        out. Replicas that were added since the spec was written down are among them."""

        async def ask(actor: Any) -> int | None:
            try:
                return await answer(actor.in_flight.remote(), LOAD_SECONDS)
            except RelaxError:
                return None

        heads = await asyncio.to_thread(living_heads, self.spec)
        told = await asyncio.gather(*(ask(actor) for actor in heads.values()))
        return tuple(count for count in told if count is not None)

    async def describe(self) -> tuple["ReplicaDescription", ...]:
        """Where the replicas are on their hosts; those without an actor are left out."""

        async def ask(replica: int) -> "ReplicaDescription | None":
            actor = await asyncio.to_thread(find_actor, self.spec, replica)
            if actor is None:
                return None
            return await answer(actor.describe.remote(), READ_SECONDS)

        found = await asyncio.gather(*(ask(k) for k in self.spec.numbers))
        return tuple(each for each in found if each is not None)

    async def _operate(self, kind: "Kind", op: EngineOperation) -> GroupReport:
        from relax_infer.engines.actor import ReplicaOutcome

        if op.weights is not None and self.spec.role != "rollout":
            InferenceEngineSpec(self.spec.role).require_operation("update_weights_from_disk")

        spec = self.spec
        limit = 2 * spec.launch_timeout + 4 * spec.drain_timeout + 120
        limit += spec.weights.drain_deadline + spec.weights.timeout

        async def ask(replica: int) -> ReplicaOutcome:
            try:
                actor = await node_actor(self.spec, replica)
            except TransientError as error:
                if kind == "forget":  # nobody is there who could refuse a person's word
                    raise UnconfirmedError(error.message, cure=error.cure) from error
                raise
            return await answer(actor.operate.remote(kind, op), limit)

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

        asked = self.spec.numbers if replicas is None else replicas
        return tuple(await asyncio.gather(*(one(k) for k in asked)))

    def _unknown(self, replica: int, error: RelaxError) -> ReplicaReport:
        return ReplicaReport(
            replica=replica,
            engine_id=self.spec.engine_id(replica),
            state=ReplicaState.FAILED,
            error=f"{error.kind}: {error}",
        )


def _told(outcome: "ReplicaOutcome") -> ReplicaReport:
    if outcome.stale is None:
        return outcome.report
    return outcome.report.model_copy(update={"state": ReplicaState.FAILED})
