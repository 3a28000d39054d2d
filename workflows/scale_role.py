"""ScaleRole: one operation that gives a model more or fewer replicas."""

from temporalio import workflow
from temporalio.exceptions import FailureError

from relax_infer.contracts.mailbox import Answer
from relax_infer.contracts.scale import Members, ScaleInput, ScaleStatus
from relax_infer.machines import SCALE, ScaleEvent
from workflows._failures import text_of
from workflows._mailbox import Mailbox
from workflows._scale_connect import ScaleConnect
from workflows._scale_in import ScaleIn
from workflows._scale_out import ScaleOut
from workflows._scale_plan import plan_scale, planned_rows
from workflows._scale_work import ScaleWork
from workflows._versions import PINNED

_E = ScaleEvent


@workflow.defn(name="ScaleRole", versioning_behavior=PINNED)
class ScaleRole:
    """Started by its role, one at a time for each model. What it has in hand is in the engine
    group's book at every moment, so that what it leaves undone can be finished by another."""

    @workflow.init
    def __init__(self, start: ScaleInput) -> None:
        self._mail = Mailbox()
        self._work = ScaleWork(start, self._mail)

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.signal
    def wind_down(self, why: str) -> None:
        """Its role is going down: nothing new is made, and what was begun is ended, with proof."""
        self._work.ending = why

    @workflow.signal
    def give_way(self, why: str) -> None:
        """A person's operation waits for the end of this one, which a policy asked for."""
        self._work.give_way(why)

    @workflow.update
    async def cancel(self) -> ScaleStatus:
        """Call it off; legal until the first engine is launched. Answers when it has ended."""
        self._work.called_off = True
        await workflow.wait_condition(lambda: self._work.state in SCALE.terminal)
        return self._work.status(ended=True)

    @cancel.validator
    def _check_cancel(self) -> None:
        state = self._work.state
        if not SCALE.allows(state, _E.CANCEL_ASKED):
            raise ValueError(f"the operation is {state}: it can be cancelled until it is CREATING")

    @workflow.query
    def status(self) -> ScaleStatus:
        return self._work.status()

    @workflow.run
    async def run(self, start: ScaleInput) -> ScaleStatus:
        work = self._work
        work.show()
        members = await self._members(start)
        work.facts["before"] = len(members.spec.numbers)
        await self._carry_out(members)
        await workflow.wait_condition(workflow.all_handlers_finished)
        try:
            members = await work.ask_group("members")
        except FailureError as error:
            workflow.logger.warning("the group does not say how it is now: %s", text_of(error))
        work.show()
        return work.status(ended=True, after=len(members.spec.numbers))

    async def _members(self, start: ScaleInput) -> Members:
        """Engines of others are the role's, not the group's: where addresses are given it is
        asked."""
        if start.request.engine_urls:
            return await self._work.ask_role("externals")
        return await self._work.ask_group("members")

    async def _carry_out(self, members: Members) -> None:
        work = self._work
        plan = plan_scale(work.request, members)
        work.facts.update(direction=plan.direction, why=plan.why)
        work.rows = planned_rows(plan, members)
        if plan.event in (_E.REFUSED, _E.TARGET_MET):
            await work.move(plan.event)
        elif work.request.dry_run:
            await work.tell()
        elif work.called_off:
            await work.move(_E.CANCEL_ASKED)
        elif plan.event is _E.OUT_STARTED:
            await ScaleOut(work, members).run(plan.create)
        elif plan.event is _E.CONNECT_STARTED:
            await ScaleConnect(work, members).run(plan.connect, plan.unknown_urls)
        else:
            going = ScaleIn(work, members)
            await going.run(plan.remove, plan.unknown_urls, plan.release)
