"""The trainer group from wherever an activity runs: its actors are found by name, or made."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.fence import StaleFence
from relax_infer.contracts.training import (
    TrainerOperation,
    TrainerReport,
    TrainerSpec,
    TrainerStatus,
    TrainRequest,
    TrainResult,
)
from relax_infer.training.others import OtherRankFailed, RankLost, RankMoved
from relax_infer.training.residence import TrainerFiles
from relax_infer.training.watching import watched

T = TypeVar("T")

log = logging.getLogger(__name__)

ACTOR_SECONDS = 90.0
"""For an actor to be placed, started and to answer its first call."""
OPERATION_SECONDS = 600.0
"""For an onload, which may read a checkpoint, or an offload, which may wait for an update."""
FORGET_SECONDS = 120.0
"""For a rank to let go on a person's word. One that has not by then is at work or hangs."""
READ_SECONDS = 30.0
TRAIN_SECONDS = 86_400.0
OTHERS_SECONDS = 60.0
"""For the other ranks to end a call that has failed on one."""
MEETING_SECONDS = 5.0
"""For a call to reach all ranks."""
DYING_SECONDS = 15.0
"""For a killed process to be gone."""
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
        self._pids = dict[int, int]()
        """By rank, of actors that have answered."""

    async def start(self) -> TrainerStatus:
        """The actors answer; nothing is on the GPUs yet. Idempotent."""
        return await self.status()

    async def onload(self, op: TrainerOperation) -> TrainerReport:
        """Resident: from the newest checkpoint if there is one, else from the model folder."""
        actors, meeting = await self._met()
        calls = [actor.onload.remote(op, meeting) for actor in actors]
        return combined(await self._all(calls, OPERATION_SECONDS))

    async def offload(self, op: TrainerOperation) -> TrainerReport:
        """Not on the GPUs any more; the report carries evidence of every rank."""
        calls = [actor.offload.remote(op) for actor in await self._actors()]
        return combined(await self._all(calls, OPERATION_SECONDS))

    async def settle(self, op: TrainerOperation) -> TrainerReport:
        """Where the trainer stands; one that holds nothing ends the token, with evidence. Makes an
        actor that is not there, which looks at what an earlier one left on the host.

        A group of which only some ranks are resident is left as it is, with a doubt."""
        if self.spec.ranks > 1:
            status = await self.status()
            if status.resident or status.doubt is not None:
                return TrainerReport(status=status)
        calls = [actor.settle.remote(op) for actor in await self._actors()]
        return combined(await self._all(calls, READ_SECONDS))

    async def forget(self, op: TrainerOperation) -> TrainerReport | None:
        """Take a person's word for the ranks that cannot be asked; every other one lets go.

        The report is of the ranks that were asked, and names the others. None: no rank could be
        asked. One that lives on all the same loads nothing more under the token: that is written
        where it looks before it loads. It stays written for ranks that were asked, too.

        Raises:
            PermanentError, UnconfirmedError: a rank was asked and did not let go; the text names
                it, and its node.
            TransientError: the store does not answer, so a rank might still load something.
        """
        ranks = range(self.spec.ranks)
        for rank in ranks:
            await asyncio.to_thread(TrainerFiles(self.spec, rank).closed.close, op.fence)
        answers = await asyncio.gather(
            *(self._forget(rank, op) for rank in ranks), return_exceptions=True
        )
        wrong = {n: e for n, e in enumerate(answers) if isinstance(e, BaseException)}
        if wrong:
            raise self._unheeded(wrong)
        told = [report for report in answers if isinstance(report, TrainerReport)]
        if not told:
            return None
        unreached = tuple(rank for rank in ranks if answers[rank] is None)
        return combined(told).model_copy(update={"unreached": unreached})

    async def _forget(self, rank: int, op: TrainerOperation) -> TrainerReport | None:
        """None: the rank cannot be asked, or is not where its GPU is any more."""
        from ray.exceptions import RayError

        try:
            actor = await self._actor(rank)
        except (RelaxError, TimeoutError, RayError) as error:
            log.warning("%s cannot be asked to let go: %r", self._named(rank), error)
            return None
        try:
            return await _answer(actor.forget.remote(op), FORGET_SECONDS)
        except RankMoved as error:
            log.warning("%s cannot be asked to let go: %s", self._named(rank), error)
            return None

    def _unheeded(self, wrong: Mapping[int, BaseException]) -> RelaxError:
        """What ranks say that did not let go on a person's word."""
        strange = [e for e in wrong.values() if not isinstance(e, RelaxError | StaleFence)]
        if strange:
            raise strange[0]
        for_good = any(isinstance(e, PermanentError | StaleFence) for e in wrong.values())
        told = "; ".join(f"{self._named(rank)}: {error}" for rank, error in wrong.items())
        # A permanent error says itself what to end: not the process that says it.
        left = [rank for rank, error in wrong.items() if not isinstance(error, PermanentError)]
        return (PermanentError if for_good else UnconfirmedError)(
            f"The word does not stand for what can be asked, and did not let go: {told}",
            cure=f"First {self._end_them(left)}; then say it again." if left else "",
        )

    def _named(self, rank: int) -> str:
        process = f" (process {self._pids[rank]})" if rank in self._pids else ""
        return f"trainer rank {rank}{self._where(rank)}{process}"

    def _where(self, rank: int) -> str:
        return f" on node {self.spec.bundles[rank].node_ip}" if self.spec.bundles else ""

    def _end_them(self, ranks: Iterable[int]) -> str:
        """How a person does."""
        return "; ".join(
            f"see{self._where(rank)} what it is (`ps -o pid,stat,lstart,cmd -p {pid}`; T: frozen,"
            f" D: in the kernel) and end it (`kill -9 {pid}`)"
            if (pid := self._pids.get(rank))
            else f"end the trainer's process{self._where(rank)}"
            for rank in ranks
        )

    async def train(self, request: TrainRequest) -> TrainResult:
        """One update from a committed partition, once; the ledger answers a repeat.

        It may take a day, as long as every rank answers and gets on.
        """
        actors, meeting = await self._met()
        calls = [
            watched(
                actor.train.remote(request, meeting),
                partial(_pulse, actor),
                self._named(rank),
                self._end_them([rank]),
            )
            for rank, actor in enumerate(actors)
        ]
        return (await self._all(calls, TRAIN_SECONDS))[0]

    async def status(self) -> TrainerStatus:
        """Where the trainer stands, from its ledger and its actors. Changes nothing but makes an
        actor that is not there, which looks at what an earlier one left on the host."""
        calls = [actor.status.remote() for actor in await self._actors()]
        return combined_status(await self._all(calls, READ_SECONDS))

    async def stop(self, op: TrainerOperation) -> TrainerReport:
        """Offload, with its evidence, and end the actors."""
        import ray

        report = await self.offload(op)
        actors = await self._actors()
        await self._all([actor.close.remote() for actor in actors], OPERATION_SECONDS)
        for actor in actors:
            await asyncio.to_thread(ray.kill, actor)
        await self._gone()
        return report

    async def _met(self) -> tuple[list[Any], str | None]:
        """Actors that have met, or are to meet, at one place; None: there is one rank.

        Ranks that met others which are gone cannot go on: all are made anew, and go on from the
        newest checkpoint.
        """
        actors = await self._actors()
        if len(actors) == 1:
            return actors, None
        deadline = asyncio.get_running_loop().time() + MEETING_SECONDS
        while True:
            places = set(await self._all([a.meeting.remote() for a in actors], READ_SECONDS))
            if len(places) == 1:
                break
            # Somebody else's call may just be reaching them.
            if asyncio.get_running_loop().time() > deadline:
                await self._end()
                actors, places = await self._actors(), {None}
                break
            await asyncio.sleep(_POLL)
        place = places.pop()
        if place is None or place.startswith("left "):
            if place is not None:
                await self._end()
                actors = await self._actors()
            await self._wait_for_the_dead(actors)
            place = await _answer(actors[0].propose.remote(), READ_SECONDS)
        return actors, place

    async def _wait_for_the_dead(self, actors: list[Any]) -> None:
        """Processes that were just killed may show for a moment yet; whether one stays is for the
        actors to say, when they are to load."""
        deadline = asyncio.get_running_loop().time() + DYING_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            ranks = await self._all([actor.status.remote() for actor in actors], READ_SECONDS)
            if all(status.doubt is None for status in ranks):
                return
            await asyncio.sleep(_POLL)

    async def _all(self, calls: Sequence[Awaitable[T]], seconds: float) -> list[T]:
        """Every rank's answer, or the error that says most.

        A rank that is lost in an update, and those that still wait for one which failed, are ended:
        the next call makes the group anew.
        """
        tasks = [asyncio.ensure_future(_answer(call, seconds)) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            done, pending = await asyncio.wait(tasks, timeout=OTHERS_SECONDS)
            if pending or any(isinstance(task.exception(), RankLost) for task in done):
                await self._end()
            if pending:
                await asyncio.wait(pending)
        finally:
            for task in tasks:
                task.cancel()
        # Those that were ended say least: that they were.
        failed = sorted(tasks, key=lambda task: task in pending)
        errors = [error for task in failed if (error := task.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, OtherRankFailed)), errors[0])
        return [task.result() for task in tasks]

    async def _end(self) -> None:
        """Kill every actor of the group. What they held is looked at by their successors."""
        import ray

        for rank in range(self.spec.ranks):
            actor = await asyncio.to_thread(self._find_actor, rank)
            if actor is not None:
                await asyncio.to_thread(ray.kill, actor)
        await self._gone()

    async def _actors(self) -> list[Any]:
        ranks = range(self.spec.ranks)
        return list(await asyncio.gather(*(self._actor(rank) for rank in ranks)))

    async def _actor(self, rank: int) -> Any:
        """The rank's actor, made if there is none; it has answered once."""
        from ray.exceptions import RayActorError

        name = self.spec.actor_name(rank)
        deadline = asyncio.get_running_loop().time() + ACTOR_SECONDS
        while True:
            actor = await asyncio.wait_for(asyncio.to_thread(self._find_actor, rank), _CONTROL)
            if actor is None:
                actor = await self._make_actor(rank)
                deadline = asyncio.get_running_loop().time() + ACTOR_SECONDS
            left = deadline - asyncio.get_running_loop().time()
            try:
                pid = await asyncio.wait_for(actor.ping.remote(), max(_POLL, left))
            except TimeoutError as error:
                raise TransientError(
                    f"Trainer actor {name} did not answer within {ACTOR_SECONDS:.0f} s.",
                    cure=f"Its bundle may be full or its node{self._where(rank)} down: look at `ray"
                    f" status`. Or it is frozen: `ray list actors --filter name={name}` says which"
                    " process; end it there (`kill -9 PID`).",
                ) from error
            except RayActorError as error:
                # It was dying when it was found; nothing was asked of it yet.
                if left < 0:
                    raise TransientError(f"Trainer actor {name} dies at its start: {error}") from (
                        error
                    )
                await asyncio.sleep(_POLL)
            else:
                self._pids[rank] = pid
                return actor

    def _find_actor(self, rank: int) -> Any | None:
        import ray

        try:
            return ray.get_actor(self.spec.actor_name(rank), namespace=self.spec.namespace)
        except ValueError:
            return None

    async def _make_actor(self, rank: int) -> Any:
        from relax_infer.placement.standing import standing_pool
        from relax_infer.training.trainer import TrainerActor

        spec = self.spec
        pool = await standing_pool(spec.run, spec.placement_group, "its trainer")
        return await pool.make_actor(
            TrainerActor,
            spec.actor_name(rank),
            spec.namespace,
            spec.bundles[rank].bundle,
            spec.ray_gpu_fraction,
            spec,
            rank,
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


def combined(reports: list[TrainerReport]) -> TrainerReport:
    """Of all ranks: evidence only where every one has given it."""
    status = combined_status([report.status for report in reports])
    evidence = [each for report in reports for each in report.evidence]
    whole = all(report.evidence for report in reports)
    return TrainerReport(status=status, evidence=tuple(evidence) if whole else ())


def combined_status(ranks: list[TrainerStatus]) -> TrainerStatus:
    """Rank 0's, resident where all are; a doubt where they differ, or one of them has one."""
    first = ranks[0]
    doubt = next((f"rank {n}: {s.doubt}" for n, s in enumerate(ranks) if s.doubt), None)
    if len(ranks) == 1:
        return first
    if doubt is None and len({status.resident for status in ranks}) > 1:
        resident = [str(n) for n, status in enumerate(ranks) if status.resident]
        doubt = f"of {len(ranks)} ranks only {', '.join(resident)} are resident"
    same = all(status.fence == first.fence for status in ranks)
    return first.model_copy(
        update={
            "resident": all(status.resident for status in ranks),
            "fence": first.fence if same else None,
            "doubt": doubt,
        }
    )


async def _pulse(actor: Any) -> int | None:
    """How far the rank is; None: its actor was begun by an older build, which only answers."""
    try:
        call = actor.pulse.remote()
    except AttributeError:
        await actor.ping.remote()
        return None
    return await call


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
