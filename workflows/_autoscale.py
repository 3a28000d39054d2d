"""Replicas by load: looks at every model that has a policy, and asks for what the policy wants."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.autoscale import (
    AutoscaleNote,
    AutoscaleStatus,
    AutoscaleSwitch,
    Load,
    LoadAsk,
    LoadReport,
)
from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import RoleInput
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.machines import GroupState, ScaleState
from relax_infer.scaling import AutoscaleDecision, decide, settled
from workflows._calls import LOOK_AT_LOAD
from workflows._failures import text_of
from workflows._scale_desk import ScaleDesk

REMEMBERED = 50
AFTER_A_FAILED_LOOK = 30.0
"""Seconds before the next one."""
_WELL = (ScaleState.ACTIVE, ScaleState.COMPLETED, ScaleState.NOOP)


class Autoscaler:
    """One for each role. What a person asks for goes first, and what they did stays for the length
    of a cool-down.

    Every decision is in the role's history: its reason labels the next look, and what it led to is
    the start of an operation.
    """

    def __init__(
        self,
        start: RoleInput,
        desk: ScaleDesk,
        group: Callable[[str], GroupSnapshot],
        show: Callable[[], None],
        carried: list[dict[str, Any]] | None = None,
    ) -> None:
        """``group``: what a model's engines are now. ``show``: called after each decision."""
        self._start, self._desk, self._group, self._show = start, desk, group, show
        self._specs = {spec.model: spec for spec in start.groups}
        self._known = {
            model: AutoscaleStatus(model=model, policy=policy)
            for model, policy in start.autoscale.items()
        }
        self._seen: dict[str, int] = {}
        """Operations of each model that the looks know of."""
        for document in carried or []:
            status = AutoscaleStatus.model_validate(document)
            if status.model in self._known:
                policy = {"policy": self._known[status.model].policy}
                self._known[status.model] = status.model_copy(update=policy)

    # --- told

    @property
    def all(self) -> list[AutoscaleStatus]:
        return list(self._known.values())

    def carry(self) -> list[dict[str, Any]]:
        """For continue-as-new."""
        return [each.model_dump(mode="json") for each in self._known.values()]

    def rows(self) -> list[tuple[str, str]]:
        """For current details."""
        return [
            (f"autoscale {each.model}", f"off: {each.off}" if each.off else _words(each.last))
            for each in self._known.values()
        ]

    # --- switched

    def check(self, switch: AutoscaleSwitch) -> None:
        """Raise ValueError with the reason unless the switch is there."""
        if not self._known:
            raise ValueError(
                f"{self._start.role} has no autoscale section in the recipe of its run: there is"
                " nothing to switch"
            )
        if switch.model is not None and switch.model not in self._known:
            raise ValueError(
                f"{switch.model} is not autoscaled: name one of {', '.join(self._known)}"
            )

    def switch(self, switch: AutoscaleSwitch) -> list[AutoscaleStatus]:
        """On again, looks are counted anew and a cool-down begins."""
        off = None if switch.on else f"{switch.who}: {switch.why}"
        for model in [switch.model] if switch.model is not None else list(self._known):
            self._note(model, off=off)
            if switch.on:
                self._settle(model, well=True)
        self._show()
        return self.all

    # --- at work

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(self._watch(model) for model in self._known))

    async def _watch(self, model: str) -> None:
        while True:
            await workflow.wait_condition(lambda: self._may_look(model))
            if self._somebody_asked(model):
                continue
            report = await self._look(model)
            if report is None or not self._may_look(model) or self._somebody_asked(model):
                continue
            await self._decide(model, report)

    def _somebody_asked(self, model: str) -> bool:
        """Whether an operation was taken in that is not ours; its effect is left alone for a
        cool-down."""
        begun = self._desk.begun.get(model, 0)
        if begun == self._seen.get(model, 0):
            return False
        self._seen[model] = begun
        self._settle(model, well=True)
        return True

    def _may_look(self, model: str) -> bool:
        """Only at a group that answers, and that nobody is at work on."""
        busy = any(each.model == model for each in self._desk.at_work)
        ready = self._group(model).state is GroupState.READY
        return ready and not busy and not self._desk.closing and self._known[model].off is None

    async def _look(self, model: str) -> LoadReport | None:
        known = self._known[model]
        ask = LoadAsk(run=self._start.run, group=self._specs[model], seconds=known.policy.interval)
        last = f"; before: {_words(known.last)}" if known.last is not None else ""
        try:
            return await LOOK_AT_LOAD(ask, summary=f"load of {model}{last}")
        except ActivityError as error:
            workflow.logger.warning("%s: nobody knows its load: %s", model, text_of(error))
            await workflow.sleep(timedelta(seconds=AFTER_A_FAILED_LOOK))
            return None

    async def _decide(self, model: str, report: LoadReport) -> None:
        known, snapshot = self._known[model], self._group(model)
        load = Load(
            at=workflow.time(),
            replicas=len([r for r in snapshot.replicas if r.replica not in snapshot.leaving]),
            in_flight=report.in_flight,
            batch_seconds=report.batch_seconds,
            step=report.step,
        )
        decided = decide(known.policy, known.memory, load)
        note = AutoscaleNote(at=load.at, load=load, target=decided.target, reason=decided.reason)
        self._note(model, memory=decided.memory, last=note)
        self._show()
        if decided.target != load.replicas:
            await self._ask(model, note, decided)

    async def _ask(self, model: str, note: AutoscaleNote, decided: AutoscaleDecision) -> None:
        request = ScaleRequest(
            operation_id=f"auto-{workflow.uuid4().hex[:12]}",
            model=model,
            num_replicas=decided.target,
            wait=True,
            by="policy",
            reason=decided.reason,
        )
        note = note.model_copy(update={"operation_id": request.operation_id})
        self._seen[model] = self._seen.get(model, 0) + 1
        earlier = self._known[model].decisions
        self._note(model, last=note, decisions=(*earlier, note)[-REMEMBERED:])
        try:
            self._desk.check(request)
            status = await self._desk.perform(request)
        except ValueError as error:
            well, outcome = False, str(error)
        else:
            # What had to make way for a person's did not fail.
            well = status.state in _WELL or self._desk.gave_way(request.operation_id)
            outcome = _outcome(status)
        note = note.model_copy(update={"outcome": outcome})
        self._note(model, last=note, decisions=(*earlier, note)[-REMEMBERED:])
        self._settle(model, well=well)
        self._show()

    # --- remembered

    def _settle(self, model: str, *, well: bool) -> None:
        memory = settled(self._known[model].memory, workflow.time(), well=well)
        self._note(model, memory=memory)

    def _note(self, model: str, **fields: Any) -> None:
        self._known[model] = self._known[model].model_copy(update=fields)


def _words(note: AutoscaleNote | None) -> str:
    if note is None:
        return "no look yet"
    then = f": {note.outcome}" if note.outcome else ""
    return f"{note.target} wanted, {note.reason}{then}"


def _outcome(status: ScaleStatus) -> str:
    whys = [status.why, *(row.why for row in status.replicas if row.failure is not None)]
    told = "; ".join(dict.fromkeys(why for why in whys if why))
    return f"{status.state}: {told}" if told and status.state not in _WELL else str(status.state)
