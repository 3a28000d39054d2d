"""Engines that somebody else started and that a role calls: which, and whether they may be called.

None is launched, stopped or rebuilt here. One that is lost, or does not take new weights, is
dropped.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, FailureError

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.external import (
    ExternalAsk,
    ExternalEngine,
    ExternalWatch,
)
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.scale import Members
from relax_infer.machines import GroupState, ReplicaState
from workflows._calls import CHECK_EXTERNAL, WATCH_EXTERNALS
from workflows._failures import text_of

ANSWERING = (GroupState.READY, GroupState.BLOCKED)
PAUSE = 10.0
"""Seconds before what could not be asked is asked again."""
Weights = tuple[int | None, str]


class Externals:
    """One for each role. An engine of others is named to callers only while it holds exactly what
    the model's own engines hold, as last read from it."""

    def __init__(
        self,
        run: RunRef,
        group: Callable[[str], GroupSnapshot],
        members: Callable[[str], Awaitable[Members]],
        changed: Callable[[], None],
        carried: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            group: what a model's own engines are now.
            members: the same from the engine group itself, with the weights it was given.
            changed: called when what may be called has changed.
        """
        document: dict[str, Any] = carried or {}
        self._run, self._group, self._members, self._changed = run, group, members, changed
        known = [ExternalEngine.model_validate(each) for each in document.get("known", [])]
        self._known = {engine.url: engine for engine in known}
        self._ever = bool(document.get("ever", False))
        """Whether one was ever adopted."""
        self._task: asyncio.Task[None] | None = None

    # --- what is

    @property
    def all(self) -> tuple[ExternalEngine, ...]:
        return tuple(self._known.values())

    def of(self, model: str) -> tuple[ExternalEngine, ...]:
        return tuple(engine for engine in self.all if engine.model == model)

    def callable(self, model: str) -> tuple[ExternalEngine, ...]:
        """Those that callers may have now."""
        wanted = self.weights_of(model)
        return tuple(
            engine
            for engine in self.of(model)
            if engine.state == "ADOPTED" and wanted == _held(engine)
        )

    def weights_of(self, model: str) -> Weights | None:
        """Version and digest of the model's own engines that answer; None where they do not, or
        hold different ones."""
        group = self._group(model)
        if group.state not in ANSWERING:
            return None
        static = group.weight_source == "STATIC"
        held = {
            (None if static else r.weight_version, r.weights_digest)
            for r in group.replicas
            if r.state is ReplicaState.READY and r.replica not in group.leaving
        }
        version, digest = held.pop() if len(held) == 1 else (None, None)
        return None if digest is None else (version, digest)

    def workers(self) -> tuple[str, ...] | None:
        """What the router may hold beside ours; None: there was never any. They have no gate that
        refuses, so they leave it as soon as ours let go."""
        return tuple(engine.url for engine in self._right()) if self._ever else None

    def carry(self) -> dict[str, Any]:
        """For continue-as-new."""
        return {
            "known": [engine.model_dump(mode="json") for engine in self.all],
            "ever": self._ever,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For current details."""
        return [(f"{e.model} at {e.url}", f"{e.state} {e.why or ''}".strip()) for e in self.all]

    # --- what happens

    def put(self, engine: ExternalEngine) -> None:
        self._known[engine.url] = engine
        self._ever = True
        if self._task is None:
            self.begin()

    def forget(self, url: str) -> ExternalEngine | None:
        return self._known.pop(url, None)

    def begin(self) -> None:
        """Look after what is adopted; nothing where nothing is."""
        if self._known:
            self._task = asyncio.create_task(self._look_after())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _look_after(self) -> None:
        while True:
            await workflow.wait_condition(lambda: bool(self._behind() or self._right()))
            if behind := self._behind():
                await asyncio.gather(*(self._renew(engine) for engine in behind))
                self._changed()
            else:
                await self._watch(self._right())

    def _behind(self) -> list[ExternalEngine]:
        """Those that have to get other weights, now that ours answer with them."""
        adopted = [engine for engine in self.all if engine.state == "ADOPTED"]
        wanted = {engine.model: self.weights_of(engine.model) for engine in adopted}
        return [e for e in adopted if wanted[e.model] not in (None, _held(e))]

    def _right(self) -> list[ExternalEngine]:
        models = dict.fromkeys(engine.model for engine in self.all)
        return [engine for model in models for engine in self.callable(model)]

    async def _renew(self, engine: ExternalEngine) -> None:
        """One that does not come to hold what ours hold is dropped."""
        try:
            members = await self._members(engine.model)
        except FailureError as error:
            workflow.logger.warning("%s is not renewed yet: %s", engine.url, text_of(error))
            await workflow.sleep(PAUSE)
            return
        wanted = self.weights_of(engine.model)
        if wanted is None or not members.ready:
            await workflow.sleep(PAUSE)
            return
        report = await self._checked(engine, members, wanted)
        if self._known.get(engine.url) != engine:
            return  # it was let go meanwhile
        if isinstance(report, str):
            self._drop(engine, report)
        else:
            version, digest = report
            held = {"weight_version": version, "weights_digest": digest}
            self._known[engine.url] = engine.model_copy(update=held)

    async def _checked(
        self, engine: ExternalEngine, members: Members, wanted: Weights
    ) -> Weights | str:
        """What it holds, read back; or why it is not what was wanted."""
        version, digest = wanted
        ask = ExternalAsk(
            run=self._run,
            model=engine.model,
            url=engine.url,
            weights=None if version is None else members.weights,
            digest=digest,
            timeout=members.spec.launch_timeout,
        )
        try:
            report = await CHECK_EXTERNAL(ask, summary=f"weights of {engine.url}")
        except ActivityError as error:
            return text_of(error)
        if not report.right:
            return report.error or "it does not hold the weights"
        return None if version is None else report.weight_version, digest

    async def _watch(self, engines: list[ExternalEngine]) -> None:
        """Until one is lost, or others are to be watched."""
        asked = ExternalWatch(
            run=self._run,
            versions={e.url: e.weight_version for e in engines},
            compares=self._group(engines[0].model).weight_source != "STATIC",
        )
        watch = asyncio.create_task(WATCH_EXTERNALS(asked, summary="watch engines of others"))
        watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await workflow.wait_condition(lambda: watch.done() or self._right() != engines)
        if not watch.done():
            watch.cancel()
            return
        try:
            lost = watch.result().lost
        except ActivityError as error:
            workflow.logger.warning("the watch of others ended: %s", text_of(error))
            await workflow.sleep(PAUSE)
            return
        for engine in engines:
            if engine.url in lost and self._known.get(engine.url) == engine:
                self._drop(engine, lost[engine.url])
        self._changed()

    def _drop(self, engine: ExternalEngine, why: str) -> None:
        workflow.logger.warning("%s is dropped: %s", engine.url, why)
        fields = {"state": "DROPPED", "why": why, "at": workflow.time()}
        self._known[engine.url] = engine.model_copy(update=fields)


def _held(engine: ExternalEngine) -> Weights | None:
    digest = engine.weights_digest
    return None if digest is None else (engine.weight_version, digest)
