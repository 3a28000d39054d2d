"""The Ray actor of one trainer rank: detached, named, in namespace ``relax-<run>``.

It puts fences, operation ids and evidence around :class:`PolicyTrainer`. Making it touches no GPU.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from relax_infer.contracts.engines import TRAINER_TAGS, ReleaseEvidence
from relax_infer.contracts.failures import PermanentError, RelaxError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.training import (
    TrainerOperation,
    TrainerReport,
    TrainerSpec,
    TrainerStatus,
    TrainRequest,
    TrainResult,
)
from relax_infer.contracts.weights import Seat, SeatAsk
from relax_infer.engines.orphans import need_nobody_beside
from relax_infer.engines.place import check_place
from relax_infer.telemetry import about, configure_actor
from relax_infer.telemetry.traces import span
from relax_infer.training._turns import Joined
from relax_infer.training.others import RankMoved
from relax_infer.training.policy import PolicyTrainer
from relax_infer.training.residence import TrainerFiles
from relax_infer.training.weight_sender import Group, WeightSender
from relax_infer.transfer.rows import PublishedRows, rows_digest

T = TypeVar("T")

log = logging.getLogger(__name__)


class TrainerActor:
    """Operations in turn, each once, under fence tokens."""

    def __init__(
        self,
        spec: TrainerSpec,
        rank: int,
        read: Callable[[str], Awaitable[PublishedRows]] | None = None,
    ) -> None:
        """``read`` gives the rows of a partition; None: TransferQueue."""
        name = spec.actor_name(rank)
        configure_actor(name, spec.run.run, role="trainer", replica=rank)
        self._files = TrainerFiles(spec, rank)
        self._run = spec.run
        self._residual = spec.residual_memory
        self._earlier = self._files.residence()
        self._fence = self._files.fence_memory()
        self._policy = PolicyTrainer(spec, rank)
        self._holder = f"trainer/rank-{rank}"
        self._bound = spec.bundles[rank] if spec.bundles else None
        self._read = read or _read_partition
        self._host = self._bound.node_ip if self._bound is not None else "127.0.0.1"
        self._sender = WeightSender(self._host, self._make_group)
        self._operations = Joined[TrainerReport]()
        self._steps = Joined[TrainResult](keep=0)  # the ledger remembers
        self._turn = asyncio.Lock()
        self._served: Any = None
        self._joined: str | None = None
        # Megatron on a CPU is bound to the thread that set it up.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron")

    async def ping(self) -> int:
        return os.getpid()

    async def pulse(self) -> int:
        """Another number than before, once an update has got on."""
        return self._policy.beats

    async def meeting(self) -> str | None:
        """Where this rank has met the others; None: it has not."""
        return self._joined

    async def propose(self) -> str:
        """Rank 0: where the ranks are to meet. The same until they have met and parted."""
        if self._served is None:
            self._served = await asyncio.to_thread(_serve, self._host)
        return self._served.address

    async def status(self) -> TrainerStatus:
        """Where the trainer stands; changes nothing, and answers during an operation."""
        self._check_place()
        ledger = await asyncio.to_thread(lambda: self._policy.ledger)
        return TrainerStatus(
            step=ledger.step,
            resident=self._policy.resident,
            fence=self._fence.seen,
            actor_pid=os.getpid(),
            doubt=self._doubt(),
        )

    async def onload(self, op: TrainerOperation, meeting: str | None = None) -> TrainerReport:
        """Parameters, gradients and optimizer on the device.

        A known operation id joins or gets the recorded report, whatever its token is now. Ranks of
        a group are asked at the same time, with the ``meeting`` that rank 0 proposed.

        Raises:
            StaleFence: a later or a rival token was seen; nothing was done.
            UnconfirmedError: an earlier trainer process, or an engine or a trainer of another run,
                may still hold the device.
            PermanentError: model or checkpoint cannot be trained.
        """
        self._join(meeting)
        return await self._operations.ask(("onload", op.operation_id), lambda: self._onload(op))

    async def offload(self, op: TrainerOperation) -> TrainerReport:
        """The device is free of the trainer; with evidence. Raises as :meth:`onload` does."""
        return await self._operations.ask(("offload", op.operation_id), lambda: self._offload(op))

    async def settle(self, op: TrainerOperation) -> TrainerReport:
        """Where the trainer stands. One that holds nothing says so with evidence and ends the
        token: what was to be loaded under it, and is still on its way, is refused from here on.

        No evidence: it is resident, at work or in doubt, and nothing was changed.
        """
        return await self._operations.ask(("settle", op.operation_id), lambda: self._settle(op))

    async def forget(self, op: TrainerOperation) -> TrainerReport:
        """A person's word that an earlier trainer process is gone, where nobody can look; this one
        lets go of what it holds. With evidence; the token has ended.

        Raises:
            PermanentError: the earlier process lives on this host: the word is wrong.
            RankMoved: this is another host, so there is nothing here to look at or to let go of.
        """
        return await self._operations.ask(("forget", op.operation_id), lambda: self._forget(op))

    async def train(self, request: TrainRequest, meeting: str | None = None) -> TrainResult:
        """One update from the partition, once: a step of the ledger returns its entry.

        A second call for a step that is being trained waits for it. Ranks of a group are asked at
        the same time.

        Raises:
            StaleFence: the token is not the current one.
            PermanentError: not resident, not the next step, other rows than asked for, or the
                update broke down.
            TransientError: TransferQueue did not answer.
        """
        self._join(meeting)
        key = (request.step, request.partition, request.digest)
        return await self._steps.ask(key, lambda: self._train(request))

    async def take_seat(self, ask: SeatAsk) -> Seat:
        """Rank 0: an engine's seat in a group to which weights are sent. Raises as
        :class:`WeightSender` does; touches nothing of the trainer's own."""
        return await self._sender.take_seat(ask)

    async def leave_seat(
        self, key: str, member: str, members: tuple[str, ...], error: str | None
    ) -> None:
        """An engine has got everything, or failed, or takes no part."""
        await self._sender.leave_seat(key, member, members, error)

    async def close(self) -> None:
        """Leave the process group; to be asked before the actor is killed."""
        async with self._turn:
            await self._in_thread(self._policy.close)

    async def _onload(self, op: TrainerOperation) -> TrainerReport:
        with about(fence=str(op.fence)):
            async with self._turn:
                await self._admit_load(op.fence)
                await self._make_resident(op.fence)
            log.info("is on the device")
        return TrainerReport(status=await self.status())

    async def _offload(self, op: TrainerOperation) -> TrainerReport:
        async with self._turn:
            self._admit(op.fence)
            evidence = await self._release(op.fence)
            self._fence.end()
            self._files.write_fence(self._fence)
        log.info("is off the device", extra={"fence": str(op.fence), "proof": evidence.proof})
        return TrainerReport(status=await self.status(), evidence=(evidence,))

    async def _settle(self, op: TrainerOperation) -> TrainerReport:
        self._check_place()
        if self._turn.locked() or self._policy.holds or self._doubt() is not None:
            return TrainerReport(status=await self.status())
        return await self._offload(op)

    async def _forget(self, op: TrainerOperation) -> TrainerReport:
        try:
            self._check_place()
        except UnconfirmedError as error:
            raise RankMoved(error.message, cure=error.cure) from error
        if self._earlier is not None:
            self._files.check_not_seen(self._earlier)
            self._earlier = None
        return await self._offload(op)

    async def _train(self, request: TrainRequest) -> TrainResult:
        async with self._turn:
            known = await asyncio.to_thread(self._policy.recorded, request.step, request.digest)
            if known is not None:
                return known
            await self._check_grant(request)
            rows = await self._read(request.partition)
            await asyncio.to_thread(_check_rows, request, rows)
            with (
                about(step=request.step, phase="TRAINING", fence=str(request.fence)),
                span("trainer update", parent=request.traceparent, rows=len(rows)) as note,
            ):
                result = await self._update(request, rows)
                for name in ("loss", "grad_norm", "tokens"):
                    note(name, getattr(result, name))
                for name, value in result.metrics.items():
                    if name.endswith("_seconds"):
                        note(name, value)
                return result

    async def _update(self, request: TrainRequest, rows: PublishedRows) -> TrainResult:
        log.info("trains on %d rows", len(rows))
        try:
            result = await self._in_thread(
                lambda: self._policy.train(request.step, rows, partition=request.partition)
            )
        except RelaxError:
            raise
        except Exception:
            log.exception("the update broke down")
            self._part()
            raise
        told = {"loss": result.loss, "grad_norm": result.grad_norm, "tokens": result.tokens}
        log.info("has trained", extra={**told, "seconds": round(result.seconds, 3)})
        return result

    def _join(self, meeting: str | None) -> None:
        """Raises :class:`UnconfirmedError`: this rank has met others elsewhere."""
        if meeting is None or meeting == self._joined:
            return
        if self._joined is not None:
            raise UnconfirmedError(
                f"{self._holder} has met others at {self._joined}, now they meet at {meeting}.",
                cure="Ask again: the group is then started anew.",
            )
        self._joined = meeting
        mine = self._served is not None and self._served.address == meeting
        self._policy.meeting = self._served if mine else meeting

    def _part(self) -> None:
        """What the ranks share may be broken: nobody meets here again."""
        if self._joined is not None:
            self._joined = f"left {self._joined}"

    async def _check_grant(self, request: TrainRequest) -> None:
        """Training needs the current grant, under which the trainer was onloaded."""
        seen = self._fence.seen
        if seen is None or request.fence.counter > seen.counter:
            raise PermanentError(
                f"Step {request.step} asks under fence token {request.fence}; the trainer was never"
                " onloaded under it.",
                cure="Onload the trainer first.",
            )
        if request.fence != seen:
            raise StaleFence(request.fence, seen)
        if self._policy.resident:
            return
        if self._earlier is None or self._earlier.resident_under != seen:
            raise PermanentError(f"Step {request.step}: the trainer is offloaded; onload it first.")
        # The process that was onloaded under this very grant died. Unless somebody has proved that
        # it sleeps, the grant is still ours.
        await self._admit_load(seen)
        await self._make_resident(seen)

    def _check_place(self, *, loads: bool = False) -> None:
        """What this host shows of an earlier trainer counts only where that one ran."""
        if self._bound is not None:
            check_place(self._holder, self._bound, loads=loads)

    def _admit(self, token: FenceToken, *, loads: bool = False) -> None:
        self._check_place(loads=loads)
        if self._earlier is not None:
            self._files.check_gone(self._earlier)
        known = self._fence.seen
        self._fence.admit(token, loads=loads)
        if token != known:
            self._files.write_fence(self._fence)

    async def _admit_load(self, token: FenceToken) -> None:
        await asyncio.to_thread(self._files.closed.check, token)
        self._admit(token, loads=True)
        if self._bound is not None and not self._policy.holds:
            mine = (self._bound,)
            await asyncio.to_thread(need_nobody_beside, self._run, self._holder, mine)

    async def _make_resident(self, token: FenceToken) -> None:
        """What was loaded before a failure is taken off the device again."""
        self._files.write_residence(token)
        try:
            await self._in_thread(self._policy.onload)
        except BaseException:
            await self._in_thread(self._policy.offload)
            if not self._policy.built:
                # They parted; the next time they meet elsewhere.
                self._joined = self._served = None
            raise
        self._earlier = None

    def _doubt(self) -> str | None:
        """Why nobody can tell whether the device is free."""
        if self._policy.holds and not self._policy.resident:
            return "the trainer is partly loaded"
        if self._earlier is not None and self._earlier.resident_under is not None:
            try:
                self._files.check_gone(self._earlier)
            except UnconfirmedError as error:
                return str(error)
        return None

    async def _release(self, token: FenceToken) -> ReleaseEvidence:
        """Let go, and say why it is believed: on CUDA by the memory that came free, on a CPU, which
        frees nothing, simulated; where this process never touched the device, because whatever
        process did is gone."""
        touched = self._policy.touched_device
        before = await self._in_thread(self._policy.memory_in_use)
        await self._in_thread(self._policy.offload)
        after = await self._in_thread(self._policy.memory_in_use)
        self._earlier = None
        self._files.write_residence(None)
        return ReleaseEvidence(
            holder=self._holder,
            proof="process_gone" if not touched else "simulated" if after is None else "memory",
            tags=TRAINER_TAGS,
            fence=token,
            at=time.time(),
            memory_before=before,
            memory_after=after,
            residual_allowed=None if after is None else self._residual,
        )

    def _make_group(self, ask: SeatAsk, world: int) -> Group:
        from relax_infer.training.torch_group import TorchGroup

        return TorchGroup(self._host, ask.backend, world, ask.timeout, self._policy.gpu)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _check_rows(request: TrainRequest, rows: PublishedRows) -> None:
    digest = rows_digest(rows)
    if len(rows) != request.keys or digest != request.digest:
        raise PermanentError(
            f"Partition {request.partition} holds {len(rows)} rows of digest {digest}; step"
            f" {request.step} was committed with {request.keys} of {request.digest}.",
            cure="Publish the step's scored.arrow again, or find out who changed the partition.",
        )


def _serve(host: str) -> Any:
    from relax_infer.training.parallel import Meeting

    return Meeting(host)


async def _read_partition(partition: str) -> PublishedRows:
    from relax_infer.transfer import read_partition

    return await read_partition(partition)
