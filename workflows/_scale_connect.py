"""Engines that others started, by their addresses: adopted, and let go of."""

import asyncio
from collections.abc import Awaitable, Callable

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.external import ExternalAsk, ExternalEngine, ExternalReport
from relax_infer.contracts.scale import Members, ScaleFailure, ScaleReplica
from relax_infer.machines import ReplicaState, ScaleEvent
from workflows._calls import CHECK_EXTERNAL, DRAIN_EXTERNAL
from workflows._failures import text_of
from workflows._scale_work import ScaleWork

_E, _F = ScaleEvent, ScaleFailure
TIMES = 3
"""That weights are looked at, where the group has got others before it was adopted."""


class _Failed(Exception):
    def __init__(self, failure: ScaleFailure, why: str | None) -> None:
        self.failure, self.why = failure, why
        super().__init__(why)


class ScaleConnect:
    """Health, weights, canary, router; side by side. One that is not right is not touched further,
    and the others are kept or let go of, as was asked."""

    def __init__(self, work: ScaleWork, members: Members) -> None:
        self._work, self._spec = work, members.spec
        self._checked: dict[str, ExternalEngine] = {}
        self._alive: list[str] = []

    async def run(self, urls: tuple[str, ...], invalid: tuple[str, ...]) -> None:
        work = self._work
        work.rows = [ScaleReplica(url=url, outcome="at work") for url in urls]
        work.rows += [
            ScaleReplica(url=url, outcome="failed", failure=_F.INVALID_ENGINE_ADDRESS)
            for url in invalid
        ]
        await work.move(_E.CONNECT_STARTED)
        self._alive = list(urls)
        stages: tuple[tuple[Callable[[str], Awaitable[None]], tuple[ScaleEvent, ...]], ...] = (
            (self._connect, (_E.CREATED, _E.HEALTH_CONFIRMED)),
            (self._check, (_E.WEIGHTS_CONFIRMED,)),
            (self._adopt, ()),
        )
        for stage, confirmed in stages:
            await self._all(stage)
            if not self._alive:
                await work.move(_E.ALL_FAILED)
                return
            for event in confirmed:
                await work.move(event)
        if len(self._alive) == len(urls) + len(invalid):
            await work.move(_E.ADOPTED)
        elif work.request.on_partial == "keep":
            await work.move(_E.SOME_FAILED)
        else:
            await asyncio.gather(*(self._roll_back(url) for url in self._alive))
            await work.move(_E.ALL_FAILED)

    async def _all(self, stage: Callable[[str], Awaitable[None]]) -> None:
        went_on = await asyncio.gather(*(self._one(url, stage) for url in self._alive))
        self._alive = [url for url, well in zip(self._alive, went_on, strict=True) if well]

    async def _one(self, url: str, stage: Callable[[str], Awaitable[None]]) -> bool:
        try:
            if self._work.ending is not None:
                raise _Failed(_F.UNKNOWN, self._work.ending)
            await stage(url)
        except _Failed as failed:
            failure, why = failed.failure, failed.why
        except FailureError as error:
            failure, why = _F.UNKNOWN, text_of(error)
        else:
            return True
        self._work.row_at(url, outcome="failed", failure=failure, why=why)
        return False

    # --- stages

    async def _connect(self, url: str) -> None:
        report = await self._ask(url, None, None)
        if not report.answers:
            raise _Failed(_F.EXTERNAL_ENGINE_CONNECT_FAILED, report.error)

    async def _check(self, url: str) -> None:
        """It holds what its siblings hold, read back; where it does not, it is told to load it."""
        members = await self._ready_members()
        static = self._spec.weight_source == "STATIC"
        held = {
            (None if static else r.weight_version, r.weights_digest)
            for r in members.replicas
            if r.state is ReplicaState.READY
        }
        version, digest = held.pop() if len(held) == 1 else (None, None)
        if digest is None:
            raise _Failed(_F.WEIGHT_SYNC_FAILED, "the model's own engines hold no one weights")
        report = await self._ask(url, None if static else members, digest)
        if not report.right:
            raise _Failed(_F.WEIGHT_SYNC_FAILED, report.error)
        self._checked[url] = ExternalEngine(
            model=self._spec.model,
            url=url,
            operation=self._work.request.operation_id,
            at=workflow.time(),
            weight_version=version,
            weights_digest=digest,
        )

    async def _adopt(self, url: str) -> None:
        for left in reversed(range(TIMES)):
            engine = self._checked[url]
            told = await self._work.ask_role(
                "adopt_external", external=engine, timeout=self._patience
            )
            if told.failure is None:
                self._work.row_at(url, outcome="added")
                return
            if told.failure is not _F.WEIGHT_UPDATE_RUNNING or not left:
                raise _Failed(told.failure, told.why)
            await self._check(url)

    async def _roll_back(self, url: str) -> None:
        why = "others could not be adopted, and all or none was asked for"
        told = await self._work.ask_role("release_external", external=self._checked[url])
        if told.failure is not None:
            self._work.row_at(url, outcome="left", failure=told.failure, why=told.why)
        else:
            self._work.row_at(url, outcome="failed", failure=_F.UNKNOWN, why=why)

    # --- pieces

    async def _ask(self, url: str, members: Members | None, digest: str | None) -> ExternalReport:
        ask = ExternalAsk(
            run=self._work.start.run,
            model=self._spec.model,
            url=url,
            weights=None if members is None else members.weights,
            digest=digest,
            timeout=self._spec.launch_timeout,
        )
        try:
            return await CHECK_EXTERNAL(ask, summary=f"look at {url}")
        except ActivityError as error:
            raise _Failed(_F.EXTERNAL_ENGINE_CONNECT_FAILED, text_of(error)) from error

    async def _ready_members(self) -> Members:
        members = await self._work.ask_group("members", until_ready=True, timeout=self._patience)
        if not members.ready:
            raise _Failed(_F.WEIGHT_UPDATE_RUNNING, f"its group is {members.state}")
        return members

    @property
    def _patience(self) -> float:
        return self._work.request.provision_timeout


class LetGo:
    """Engines of others lose our callers; they are neither stopped nor waited for without end."""

    def __init__(self, work: ScaleWork, spec: EngineGroupSpec, patience: float) -> None:
        self._work, self._spec, self._patience = work, spec, patience

    async def one(self, url: str) -> bool:
        """Whether nobody of ours calls it any more."""
        work, spec = self._work, self._spec
        engine = ExternalEngine(
            model=spec.model, url=url, operation=work.request.operation_id, at=workflow.time()
        )
        work.row_at(url, outcome="at work")
        try:
            told = await work.ask_role("release_external", external=engine)
        except FailureError as error:
            work.row_at(url, outcome="unchanged", failure=_F.UNKNOWN, why=text_of(error))
            return False
        if told.failure is not None:
            work.row_at(url, outcome="unchanged", failure=told.failure, why=told.why)
            return False
        why = None if work.request.force else await self._drain(url)
        work.row_at(url, outcome="removed", why=why)
        return True

    async def _drain(self, url: str) -> str | None:
        """What it may still work on: perhaps for others, which nobody here can tell."""
        ask = ExternalAsk(
            run=self._work.start.run, model=self._spec.model, url=url, timeout=self._patience
        )
        try:
            left = (await DRAIN_EXTERNAL(ask, summary=f"last requests of {url}")).left
        except ActivityError as error:
            return text_of(error)
        return f"it still works on {left} requests, of whomever" if left else None
