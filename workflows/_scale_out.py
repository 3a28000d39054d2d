"""Scale-out: every replica gets GPUs, an engine, the group's weights, a canary, and its callers."""

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

from relax_infer.contracts.engines import (
    AddedReplica,
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
)
from relax_infer.contracts.scale import Members, PlacementAnswer, PlacementAsk, ScaleFailure
from relax_infer.machines import ReplicaState, ScaleEvent
from workflows._calls import (
    BIND_ADDED_REPLICA,
    LAUNCH_ENGINES,
    LOAD_ENGINE_WEIGHTS,
    PROBE_ENGINES,
    Call,
)
from workflows._failures import PERMANENT, text_of
from workflows._remains import operate
from workflows._scale_work import ScaleWork

_E, _F = ScaleEvent, ScaleFailure


class _Failed(Exception):
    """One replica will not be."""

    def __init__(self, failure: ScaleFailure, why: str | None) -> None:
        self.failure, self.why = failure, why
        super().__init__(why)


class ScaleOut:
    """Replicas go through each stage side by side; one that fails is ended and told, and the others
    go on."""

    def __init__(self, work: ScaleWork, members: Members) -> None:
        self._work = work
        self._spec: EngineGroupSpec = members.spec
        self._placements: dict[int, AddedReplica] = {}
        self._alive: list[int] = []
        self._some_failed = False

    async def run(self, number: int) -> None:
        work = self._work
        await work.move(_E.OUT_STARTED)
        reserved = await work.ask_group("reserve", number=number)
        self._alive = list(reserved.reserved)
        work.rows = []
        for k in self._alive:
            work.row(k, engine_id=self._spec.engine_id(k), outcome="at work")
        stages: tuple[tuple[Callable[[int], Awaitable[None]], ScaleEvent], ...] = (
            (self._create, _E.CREATED),
            (self._launch, _E.HEALTH_CONFIRMED),
            (self._load, _E.WEIGHTS_CONFIRMED),
            (self._adopt, _E.ADOPTED),
        )
        for stage, confirmed in stages:
            await self._all(stage)
            if work.called_off:
                await work.move(_E.CANCEL_ASKED)
                return
            if not self._alive:
                await work.move(_E.ALL_FAILED)
                return
            if confirmed is _E.ADOPTED and self._some_failed:
                confirmed = _E.SOME_FAILED
            await work.move(confirmed)

    async def _all(self, stage: Callable[[int], Awaitable[None]]) -> None:
        went_on = await asyncio.gather(*(self._one(k, stage) for k in self._alive))
        self._alive = [k for k, well in zip(self._alive, went_on, strict=True) if well]

    async def _one(self, replica: int, stage: Callable[[int], Awaitable[None]]) -> bool:
        try:
            self._need_leave_to_go_on()
            await stage(replica)
            if stage != self._adopt:
                self._need_leave_to_go_on()
        except _Failed as failed:
            failure, why = failed.failure, failed.why
        except FailureError as error:
            failure, why = _F.UNKNOWN, text_of(error)
        else:
            return True
        self._some_failed = True
        await self._work.roll_back(replica, self._placements.get(replica), failure, why)
        return False

    def _need_leave_to_go_on(self) -> None:
        if self._work.called_off:
            raise _Failed(_F.UNKNOWN, "the operation was cancelled")
        if self._work.ending is not None:
            raise _Failed(_F.UNKNOWN, self._work.ending)

    # --- stages

    async def _create(self, replica: int) -> None:
        """A placement group of its own, and the actors of all of its nodes in it."""
        answer = await self._bound(replica)
        if answer.placement is None:
            raise _Failed(answer.failure or _F.PROVISION_FAILED, answer.why)
        placement = self._placements[replica] = answer.placement
        # Before anything of it runs the group knows where it would.
        await self._work.ask_group("placed", placement=placement)
        seen = await self._look(placement)
        if seen.state is not ReplicaState.DEAD:
            raise _Failed(_F.NO_HANDLES, seen.error or f"it is {seen.state} before its launch")

    async def _bound(self, replica: int) -> PlacementAnswer:
        request = self._work.request
        ask = PlacementAsk(
            run=self._work.start.run,
            group=self._spec,
            replica=replica,
            timeout=request.provision_timeout,
        )
        binding = asyncio.create_task(
            BIND_ADDED_REPLICA(ask, summary=f"GPUs for {self._spec.engine_id(replica)}")
        )
        await self._work.until(lambda: binding.done() or self._work.called_off)
        if not binding.done():
            binding.cancel()
            await workflow.wait_condition(binding.done)
            self._need_leave_to_go_on()
        try:
            return binding.result()
        except ActivityError as error:
            raise _Failed(_F.PROVISION_FAILED, text_of(error)) from error

    async def _look(self, placement: AddedReplica) -> ReplicaReport:
        name = self._spec.engine_id(placement.replica)
        try:
            looked = await PROBE_ENGINES(self._spec.alone(placement), summary=f"actors of {name}")
        except ActivityError as error:
            raise _Failed(_F.NO_HANDLES, text_of(error)) from error
        (report,) = looked.replicas
        return report

    async def _launch(self, replica: int) -> None:
        """Its server answers, gate closed, under the role's grant."""
        report = await self._have(replica, LAUNCH_ENGINES, "launch", _F.UNKNOWN)
        if report.state is not ReplicaState.ONLOADING:
            hopeless = (report.error or "").startswith(f"{PERMANENT}:")
            failure = _F.ENGINE_INIT_FAILED if hopeless else _F.HEALTH_CHECK_FAILED
            raise _Failed(failure, report.error or f"it is {report.state}")

    async def _load(self, replica: int) -> None:
        """The weights that the group is at by now, read back."""
        if (await self._ready_members()).weights is None:
            return  # those it was launched with never change
        report = await self._have(
            replica, LOAD_ENGINE_WEIGHTS, "load weights into", _F.WEIGHT_SYNC_FAILED
        )
        if report.state is not ReplicaState.ONLOADING:
            raise _Failed(_F.WEIGHT_SYNC_FAILED, report.error or f"it is {report.state}")

    async def _have(
        self,
        replica: int,
        call: Call[EngineOperation, GroupReport],
        doing: str,
        failure: ScaleFailure,
    ) -> ReplicaReport:
        members = await self._ready_members()
        assert members.fence is not None
        try:
            return await operate(
                call,
                doing,
                self._spec,
                self._placements[replica],
                self._work.next_id(doing.split()[0]),
                members.fence,
                members.weights,
            )
        except ActivityError as error:
            raise _Failed(failure, text_of(error)) from error

    async def _ready_members(self) -> Members:
        """Grant and weights are the group's while it is READY; in between it has neither."""
        members = await self._work.ask_group("members", until_ready=True, timeout=self._patience)
        if not members.ready:
            self._need_leave_to_go_on()
            raise _Failed(_F.WEIGHT_UPDATE_RUNNING, f"its group is {members.state}")
        return members

    async def _adopt(self, replica: int) -> None:
        """Canary, gate, table, router; the role answers when all of it was done."""
        placement = self._placements[replica]
        members = await self._work.ask_role("adopt", placement=placement, timeout=self._patience)
        if members.failure is not None:
            raise _Failed(members.failure, members.why)
        self._work.row(replica, outcome="added", url=members.urls.get(replica))

    @property
    def _patience(self) -> float:
        return self._work.request.provision_timeout
