"""InferenceRole: one role (rollout, genrm or teacher), its engine groups and its registry."""

import asyncio
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.autoscale import AutoscaleStatus, AutoscaleSwitch
from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.lease import (
    HolderLost,
    LeaseAnswer,
    LeaseRequest,
    RoleCommand,
    RoleInput,
    RoleOperation,
    RoleResult,
)
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.scale import (
    MEMBER_METHODS,
    MemberAsk,
    Members,
    ScaleRequest,
    ScaleStatus,
)
from relax_infer.machines import GROUP, GroupState, ReplicaState
from workflows._autoscale import Autoscaler
from workflows._externals import Externals
from workflows._failures import PERMANENT, fail
from workflows._mailbox import Mailbox
from workflows._publication import Publication
from workflows._role_groups import RoleGroups
from workflows._role_members import RoleMembers
from workflows._scale_desk import ScaleDesk
from workflows._versions import AUTO_UPGRADE
from workflows._visible import show_details, show_state

TERMS_PER_RESTART = 1_000_000
"""Above every term that a role's incarnation reaches by continuing as new."""
UPDATES_PER_HISTORY = 1500
"""Temporal takes 2000."""
_SETTLED = (GroupState.READY, GroupState.SLEEPING, GroupState.STOPPED)


@workflow.defn(name="InferenceRole", versioning_behavior=AUTO_UPGRADE)
class InferenceRole:
    """Carries the lease's operations to its engine groups and publishes what may be called.

    A role is unpublished before its engines let go, and published after they are up. The registry
    lives here; the gateway is pushed to, and asks the query ``registry`` when it starts empty.
    """

    @workflow.init
    def __init__(self, start: RoleInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._mail = Mailbox(carried.get("answers"))
        self._groups = RoleGroups(start, self._mail, carried.get("groups"), carried.get("fence"))
        self._introduced = False
        """Whether the lease was told in this history what the role operates on."""
        self._externals = Externals(
            start.run,
            self._groups.of,
            self._groups.weights_of,
            self._note_change,
            carried.get("externals"),
        )
        term = int(carried.get("term", start.restarts * TERMS_PER_RESTART)) + 1
        self._publication = Publication(
            start, term, self._groups, self._externals, carried.get("front")
        )
        self._doing = ""
        self._turn = asyncio.Lock()
        self._desk = ScaleDesk(start, self._mail, carried.get("scaling"))
        self._autoscaler = Autoscaler(
            start, self._desk, self._groups.of, self._show, carried.get("autoscaling")
        )
        self._members = RoleMembers(
            self._turn,
            lambda model: self._groups.of(model).state is GroupState.READY,
            lambda: self._desk.closing,
            self._groups.ask_members,
            self._publication.publish,
            self._externals,
        )
        self._stopped = False
        self._updates = 0

    @workflow.run
    async def run(self, start: RoleInput) -> None:
        if start.carried is None:
            await self._groups.begin()
        self._publication.begin()
        self._show()
        tasks = [asyncio.create_task(self._publication.keep_up(self._turn, self._show))]
        if start.autoscale:
            tasks.append(asyncio.create_task(self._autoscaler.run()))
        self._externals.begin()
        while not self._stopped:
            await workflow.wait_condition(lambda: self._stopped or self._may_continue_as_new)
            await workflow.wait_condition(workflow.all_handlers_finished)
            if not self._stopped and self._may_continue_as_new:
                workflow.continue_as_new(start.model_copy(update={"carried": self._carry()}))
        for task in tasks:
            task.cancel()
        self._externals.end()

    @property
    def _may_continue_as_new(self) -> bool:
        quiet = not (self._turn.locked() or self._publication.behind or self._desk.at_work)
        long = workflow.info().is_continue_as_new_suggested() or self._updates > UPDATES_PER_HISTORY
        return quiet and long

    def _carry(self) -> dict[str, Any]:
        return {
            "answers": self._mail.carry(),
            "groups": self._groups.carry(),
            "fence": self._groups.fence.model_dump() if self._groups.fence else None,
            "term": self._publication.term,
            "front": self._publication.carry(),
            "scaling": self._desk.carry(),
            "autoscaling": self._autoscaler.carry(),
            "externals": self._externals.carry(),
        }

    # --- ways in

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        await self._mail.serve(ask, self._answer)

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        self._mail.deliver(answer)

    @workflow.signal
    async def group_changed(self, snapshot: GroupSnapshot) -> None:
        """An engine group says what it has become; it does so before it answers an operation.

        What nobody asked for (a lost replica, a rebuilt one) is published at once, and the lease
        hears of a holder that cannot go on by itself.
        """
        known = self._groups.hear(snapshot)
        if known is None:
            return
        self._note_change()
        if self._doing:
            return  # the operation publishes it, or what it failed with leaves it to be published
        stopped = known.state is GroupState.BLOCKED and snapshot.state is GroupState.SLEEPING
        why = snapshot.stuck or (f"no engine of {snapshot.model} is left" if stopped else None)
        if why is not None and why != known.stuck:
            await self._tell_lease(why)
        elif snapshot.state in _SETTLED and snapshot.state is not known.state:
            await self._signal_lease("holder_known", self._start.role)

    @workflow.signal
    def scale_changed(self, status: ScaleStatus) -> None:
        """An operation of ScaleRole entered a state."""
        self._desk.heard(status)
        self._show()

    @workflow.update
    async def scale(self, request: ScaleRequest) -> ScaleStatus:
        """More or fewer replicas of a model; the same operation id joins or gets its result."""
        self._updates += 1
        return await self._desk.perform(request)

    @scale.validator
    def _check_scale(self, request: ScaleRequest) -> None:
        self._desk.check(request)

    @workflow.query
    def scaling(self) -> list[ScaleStatus]:
        """The scale operations at work and the last that ended, oldest first."""
        return self._desk.all

    @workflow.query
    def externals(self) -> list[ExternalEngine]:
        """Engines of others that were adopted, those that were dropped since among them."""
        return list(self._externals.all)

    @workflow.update
    async def autoscale(self, switch: AutoscaleSwitch) -> list[AutoscaleStatus]:
        """Stop looking at the load, or begin anew; what a policy has at work goes on."""
        self._updates += 1
        return self._autoscaler.switch(switch)

    @autoscale.validator
    def _check_autoscale(self, switch: AutoscaleSwitch) -> None:
        self._autoscaler.check(switch)

    @workflow.query
    def autoscaling(self) -> list[AutoscaleStatus]:
        """What each policy decided last and why, and what it led to."""
        return self._autoscaler.all

    @workflow.query
    def snapshot(self) -> dict[str, Any]:
        """The role's schema 2 document."""
        return self._publication.document()

    @workflow.query
    def replicas(self) -> list[GroupSnapshot]:
        """Every engine group with the state of each replica."""
        return list(self._groups.all)

    @workflow.query
    def registry(self) -> dict[str, Any]:
        """What a gateway that starts empty asks for."""
        return {"term": self._publication.term, "document": self._publication.document()}

    @workflow.update
    async def onload(self, command: RoleCommand) -> LeaseAnswer:
        """Have the lease grant the pool to this role and bring its engines up; between batches."""
        self._updates += 1
        request = LeaseRequest.model_validate(
            {"method": "acquire", "role": self._start.role, **command.model_dump()}
        )
        return await self._ask_lease(request)

    @workflow.update
    async def offload(self, command: RoleCommand) -> LeaseAnswer:
        """Have the lease take the pool back, with proof; what a person's ``onload`` ends with."""
        self._updates += 1
        request = LeaseRequest.model_validate(
            {
                "method": "release",
                "role": self._start.role,
                "operation_id": command.operation_id,
            }
        )
        return await self._ask_lease(request)

    @onload.validator
    def _check_onload(self, command: RoleCommand) -> None:
        self._check_offload(command)
        role = self._start.role
        if command.purpose == "train":
            raise ValueError(f"{role} does not train: onload it for startup, weight_sync or eval")
        if command.weights is not None and role != "rollout":
            raise ValueError(f"the weights of {role} are STATIC: onload it without weights")
        if self._desk.closing:
            raise ValueError(f"{role} is going down: nothing of it is brought up any more")

    @offload.validator
    def _check_offload(self, command: RoleCommand) -> None:
        if not command.operation_id.strip():
            raise ValueError(
                "an operation_id is needed: any text that you give to no other operation; the same"
                " again gets the same answer"
            )

    async def _ask_lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Nobody loads past the lease: it calls this role back with a fence token."""
        return await self._mail.ask(
            self._lease.id,
            request.method,
            request,
            LeaseAnswer,
            operation_id=request.operation_id,
            again=True,
        )

    @workflow.update
    async def recover(self) -> RoleResult:
        """Give replicas that were given up another try."""
        self._updates += 1
        operation = RoleOperation(method="recover", fence=None)
        return await self._groups.operate(operation, f"{workflow.uuid4()}")

    @recover.validator
    def _check_recover(self) -> None:
        if self._desk.closing:
            raise ValueError(f"{self._start.role} is going down: nothing of it is rebuilt any more")

    @workflow.update
    async def shutdown(self) -> RoleResult:
        """Unpublish the role and end its engines, with proof."""
        self._updates += 1
        operation = RoleOperation(method="stop", fence=None)
        return await self._exclusively(operation, f"{workflow.uuid4()}")

    @shutdown.validator
    def _check_shutdown(self) -> None:
        held = [g.model for g in self._groups.all if GROUP.holds(g.state)]
        if held:
            raise ValueError(
                f"{', '.join(held)} hold GPUs under the lease: release the role first"
                f" ({self._start.run.run}.lease, update release)"
            )

    async def _answer(self, ask: Ask) -> RoleResult | Members:
        if ask.method in MEMBER_METHODS:
            return await self._members.step(MemberAsk.model_validate(ask.payload), ask.operation_id)
        operation = RoleOperation.model_validate(ask.payload)
        result = await self._perform(operation, ask.operation_id)
        if self._introduced or ask.asker != self._lease.id:
            return result
        self._introduced = True
        return result.model_copy(update={"groups": self._start.groups})

    async def _perform(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        if operation.method in ("probe", "resolve", "ready", "recover"):
            result = await self._groups.operate(operation, operation_id)
            async with self._turn:
                await self._publication.publish()
            return result
        return await self._exclusively(operation, operation_id)

    async def _exclusively(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        if operation.method == "stop":
            await self._desk.wind_down()
        async with self._turn:
            self._doing = operation.method
            try:
                return await self._operate(operation, operation_id)
            finally:
                self._doing = ""
                self._show()

    async def _operate(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        match operation.method:
            case "onload":
                result = await self._groups.operate(operation, operation_id)
                await self._publication.publish()
            case "update":
                self._groups.close(GroupState.ONLOADING, ReplicaState.ONLOADING)
                await self._publication.publish()
                result = await self._groups.operate(operation, operation_id)
                await self._publication.publish()
            case "offload" | "stop":
                self._groups.close(GroupState.DRAINING, ReplicaState.DRAINING)
                await self._publication.publish()
                result = await self._groups.operate(operation, operation_id)
                if operation.method == "stop":
                    await self._publication.publish()
                    self._stopped = True
                else:  # nobody is sent to it any more; that it sleeps may be told meanwhile
                    self._note_change()
            case _:
                raise fail(PERMANENT, f"a role cannot {operation.method}")
        return result

    # --- pieces

    def _note_change(self) -> None:
        self._publication.behind = True

    async def _tell_lease(self, why: str) -> None:
        lost = HolderLost.model_validate({"role": self._start.role, "why": why})
        await self._signal_lease("holder_lost", lost)

    async def _signal_lease(self, signal: str, news: HolderLost | str) -> None:
        try:
            await self._lease.signal(signal, news)
        except ApplicationError as error:  # ended by hand: one that begins anew asks everybody
            workflow.logger.warning("the lease is gone: %s", error)

    @property
    def _lease(self) -> workflow.ExternalWorkflowHandle[Any]:
        return workflow.get_external_workflow_handle(f"{self._start.run.run}.lease")

    def _show(self) -> None:
        states = {g.state for g in self._groups.all}
        state = states.pop() if len(states) == 1 else GroupState.ONLOADING
        show_state(state)
        doing = f"{self._start.role} is **{state}**" + (
            f" ({self._doing})." if self._doing else "."
        )
        rows = [
            (f"{g.model} replica {r.replica}", f"{r.state}, weights {r.weight_version}")
            for g in self._groups.all
            for r in g.replicas
        ]
        rows += [
            (f"scale {each.operation_id}", f"{each.model}: {each.state}")
            for each in self._desk.at_work
        ]
        rows += self._autoscaler.rows() + self._externals.rows()
        show_details(doing, rows)
