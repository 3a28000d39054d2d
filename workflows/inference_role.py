"""InferenceRole: one role (rollout, genrm or teacher), its engine groups and its registry."""

import asyncio
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

from relax_infer.contracts.autoscale import AutoscaleStatus, AutoscaleSwitch
from relax_infer.contracts.batch import RegistryPush
from relax_infer.contracts.engines import EngineGroupSpec, GroupSnapshot
from relax_infer.contracts.external import ExternalEngine
from relax_infer.contracts.lease import (
    HolderLost,
    LeaseAnswer,
    LeaseRequest,
    LifecycleInput,
    RoleCommand,
    RoleInput,
    RoleOperation,
    RoleResult,
)
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.run import FrontAddress
from relax_infer.contracts.scale import (
    MEMBER_METHODS,
    MemberAsk,
    Members,
    ScaleRequest,
    ScaleStatus,
)
from relax_infer.discovery import InferenceRegistry
from relax_infer.machines import GROUP, GroupState, ReplicaState
from workflows._autoscale import Autoscaler
from workflows._calls import ENSURE_FRONT, PUSH_REGISTRY
from workflows._externals import Externals
from workflows._failures import PERMANENT, fail, text_of
from workflows._mailbox import Mailbox
from workflows._registry import models_of, routing_of
from workflows._role_members import RoleMembers
from workflows._scale_desk import ScaleDesk
from workflows._versions import AUTO_UPGRADE
from workflows._visible import attributes, show_details, show_state

TERMS_PER_RESTART = 1_000_000
"""Above every term that a role's incarnation reaches by continuing as new."""
PUBLISH_PAUSE = 5.0
"""Seconds before what could not be published is tried again."""
PATIENT = {"ready": 604_800.0, "recover": 604_800.0}
"""Seconds that an engine group may take for what ends with its recoveries: these have deadlines of
their own, and one that waits for proof waits for a person."""
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
        self._groups: dict[str, GroupSnapshot] = {
            g.model: GroupSnapshot(
                role=g.role, model=g.model, state=GROUP.initial, weight_source=g.weight_source
            )
            for g in start.groups
        }
        for document in carried.get("groups", []):
            snapshot = GroupSnapshot.model_validate(document)
            self._groups[snapshot.model] = snapshot
        self._term = int(carried.get("term", start.restarts * TERMS_PER_RESTART)) + 1
        self._front: FrontAddress | None = None
        self._registry = InferenceRegistry(start.role, registry_epoch=str(workflow.uuid4()))
        self._doing = ""
        self._turn = asyncio.Lock()
        self._changed = False
        """Whether a group changed by itself since the last publication."""
        self._desk = ScaleDesk(start, self._mail, carried.get("scaling"))
        self._autoscaler = Autoscaler(
            start,
            self._desk,
            lambda model: self._groups[model],
            self._show,
            carried.get("autoscaling"),
        )
        self._externals = Externals(
            start.run,
            lambda model: self._groups[model],
            self._weights_of,
            self._note_change,
            carried.get("externals"),
        )
        self._members = RoleMembers(
            self._turn,
            lambda model: self._groups[model].state is GroupState.READY,
            lambda: self._desk.closing,
            self._ask_members,
            self._publish,
            self._externals,
        )
        self._stopped = False

    @workflow.run
    async def run(self, start: RoleInput) -> None:
        if start.carried is None:
            for group in start.groups:
                await self._start_group(group)
        self._registry.publish(self._models(), routing=routing_of(self._start.groups))
        self._show()
        tasks = [asyncio.create_task(self._publish_changes())]
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
        quiet = not self._turn.locked() and not self._changed and not self._desk.at_work
        return quiet and workflow.info().is_continue_as_new_suggested()

    async def _publish_changes(self) -> None:
        while True:
            await workflow.wait_condition(lambda: self._changed)
            refused = None
            async with self._turn:
                if self._changed:
                    try:
                        await self._publish()
                    except ActivityError as error:
                        refused = error
            self._show()
            if refused is not None:
                workflow.logger.error("cannot publish: %s", text_of(refused))
                self._changed = True
                await workflow.sleep(PUBLISH_PAUSE)

    def _carry(self) -> dict[str, Any]:
        return {
            "answers": self._mail.carry(),
            "groups": [g.model_dump(mode="json") for g in self._groups.values()],
            "term": self._term,
            "scaling": self._desk.carry(),
            "autoscaling": self._autoscaler.carry(),
            "externals": self._externals.carry(),
        }

    async def _start_group(self, group: EngineGroupSpec) -> None:
        run = self._start.run.run
        await workflow.start_child_workflow(
            "EngineLifecycle",
            LifecycleInput(
                run=self._start.run, group=group, operation_timeout=self._start.operation_timeout
            ),
            id=self._group_id(group.model),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            search_attributes=attributes(run=run, role=group.role),
            static_summary=f"{group.role} engines of {run}: {group.replicas} x {group.model}",
        )

    def _group_id(self, model: str) -> str:
        return f"{self._start.run.run}.{self._start.role}.{model}"

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
        known = self._groups.get(snapshot.model)
        if known is None or snapshot.number < known.number:
            return  # no group of ours, or a later one overtook it
        self._groups[snapshot.model] = snapshot
        self._changed = True
        if self._doing:
            return  # the operation publishes it, or what it failed with leaves it to be published
        stopped = known.state is GroupState.BLOCKED and snapshot.state is GroupState.SLEEPING
        why = snapshot.stuck or (f"no engine of {snapshot.model} is left" if stopped else None)
        if why is not None and why != known.stuck:
            await self._tell_lease(why)
        elif snapshot.state in _SETTLED and snapshot.state is not known.state:
            await self._lease.signal("holder_known", self._start.role)

    @workflow.signal
    def scale_changed(self, status: ScaleStatus) -> None:
        """An operation of ScaleRole entered a state."""
        self._desk.heard(status)
        self._show()

    @workflow.update
    async def scale(self, request: ScaleRequest) -> ScaleStatus:
        """More or fewer replicas of a model; the same operation id joins or gets its result."""
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
        return self._registry.snapshot()

    @workflow.query
    def replicas(self) -> list[GroupSnapshot]:
        """Every engine group with the state of each replica."""
        return list(self._groups.values())

    @workflow.query
    def registry(self) -> dict[str, Any]:
        """What a gateway that starts empty asks for."""
        return {"term": self._term, "document": self._registry.snapshot()}

    @workflow.update
    async def onload(self, command: RoleCommand) -> LeaseAnswer:
        """Have the lease grant the pool to this role and bring its engines up; between batches."""
        request = LeaseRequest.model_validate(
            {"method": "acquire", "role": self._start.role, **command.model_dump()}
        )
        return await self._ask_lease(request)

    @workflow.update
    async def offload(self, command: RoleCommand) -> LeaseAnswer:
        """Have the lease take the pool back, with proof; what a person's ``onload`` ends with."""
        request = LeaseRequest.model_validate(
            {
                "method": "release",
                "role": self._start.role,
                "operation_id": command.operation_id,
            }
        )
        return await self._ask_lease(request)

    async def _ask_lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Nobody loads past the lease: it calls this role back with a fence token."""
        return await self._mail.ask(
            self._lease.id, request.method, request, LeaseAnswer, operation_id=request.operation_id
        )

    @workflow.update
    async def recover(self) -> RoleResult:
        """Give replicas that were given up another try."""
        operation = RoleOperation(method="recover", fence=None)
        return await self._pass_on(operation, f"{workflow.uuid4()}")

    @workflow.update
    async def shutdown(self) -> RoleResult:
        """Unpublish the role and end its engines, with proof."""
        operation = RoleOperation(method="stop", fence=None)
        return await self._exclusively(operation, f"{workflow.uuid4()}")

    @shutdown.validator
    def _check_shutdown(self) -> None:
        held = [g.model for g in self._groups.values() if GROUP.holds(g.state)]
        if held:
            raise ValueError(
                f"{', '.join(held)} hold GPUs under the lease: release the role first"
                f" ({self._start.run.run}.lease, update release)"
            )

    async def _answer(self, ask: Ask) -> RoleResult | Members:
        if ask.method in MEMBER_METHODS:
            return await self._members.step(MemberAsk.model_validate(ask.payload), ask.operation_id)
        operation = RoleOperation.model_validate(ask.payload)
        if operation.method in ("probe", "resolve", "ready", "recover"):
            result = await self._pass_on(operation, ask.operation_id)
            async with self._turn:
                await self._publish()
            return result
        return await self._exclusively(operation, ask.operation_id)

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
                result = await self._pass_on(operation, operation_id)
                await self._publish()
            case "update":
                self._close_groups(GroupState.ONLOADING, ReplicaState.ONLOADING)
                await self._publish()
                result = await self._pass_on(operation, operation_id)
                await self._publish()
            case "offload" | "stop":
                self._close_groups(GroupState.DRAINING, ReplicaState.DRAINING)
                await self._publish()
                result = await self._pass_on(operation, operation_id)
                stops = operation.method == "stop"
                if stops or not workflow.patched("published-after-offload"):
                    await self._publish()
                else:  # nobody is sent to it any more; that it sleeps may be told meanwhile
                    self._changed = True
                self._stopped = stops
            case _:
                raise fail(PERMANENT, f"a role cannot {operation.method}")
        return result

    # --- pieces

    async def _pass_on(self, operation: RoleOperation, operation_id: str) -> RoleResult:
        """Have every engine group do it; all must succeed, none is left unawaited."""
        outcomes = await asyncio.gather(
            *(
                self._ask_group(group.model, operation, operation_id)
                for group in self._start.groups
            ),
            return_exceptions=True,
        )
        results: list[RoleResult] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        versions = {r.weight_version for r in results}
        digests = {r.weights_digest for r in results}
        states = {r.state for r in results}
        return RoleResult(
            evidence=tuple(e for r in results for e in r.evidence),
            holders=tuple(h for r in results for h in r.holders),
            weight_version=versions.pop() if len(versions) == 1 else None,
            weights_digest=digests.pop() if len(digests) == 1 else None,
            state=states.pop() if len(states) == 1 else "BLOCKED",
            why="; ".join(r.why for r in results if r.why is not None) or None,
        )

    async def _ask_group(
        self, model: str, operation: RoleOperation, operation_id: str
    ) -> RoleResult:
        result = await self._mail.ask(
            self._group_id(model),
            operation.method,
            operation,
            RoleResult,
            operation_id=f"{operation_id}@{model}",
            timeout=PATIENT.get(operation.method, self._start.operation_timeout),
        )
        self._learn(result.snapshot)
        return result

    async def _ask_members(self, ask: MemberAsk, operation_id: str) -> Members:
        members = await self._mail.ask(
            self._group_id(ask.model),
            ask.method,
            ask,
            Members,
            operation_id=operation_id,
            timeout=ask.timeout + self._start.operation_timeout,
        )
        self._learn(members.snapshot)
        return members

    def _learn(self, told: GroupSnapshot | None) -> None:
        """What an answer says that a group has become, unless a later word was here before it."""
        if told is not None and told.number > self._groups[told.model].number:
            self._groups[told.model] = told

    async def _weights_of(self, model: str) -> Members:
        ask = MemberAsk(method="members", model=model, operation="externals")
        return await self._ask_members(ask, f"{workflow.uuid4()}")

    def _note_change(self) -> None:
        self._changed = True

    def _close_groups(self, group_state: GroupState, replica_state: ReplicaState) -> None:
        """Show what is READY as it will be, before anything of it lets go or changes."""
        for model, group in self._groups.items():
            if group.state is GroupState.READY:
                closed = tuple(
                    r.model_copy(update={"state": replica_state, "base_url": None})
                    if r.state is ReplicaState.READY
                    else r
                    for r in group.replicas
                )
                self._groups[model] = group.model_copy(
                    update={"state": group_state, "replicas": closed}
                )

    def _models(self) -> list[Any]:
        router = self._front.router_url if self._front else None
        return models_of(tuple(self._groups.values()), router, self._externals.callable)

    async def _tell_lease(self, why: str) -> None:
        lost = HolderLost.model_validate({"role": self._start.role, "why": why})
        await self._lease.signal("holder_lost", lost)

    @property
    def _lease(self) -> workflow.ExternalWorkflowHandle[Any]:
        return workflow.get_external_workflow_handle(f"{self._start.run.run}.lease")

    async def _publish(self) -> None:
        """Bring registry, router and gateway to what the groups are."""
        self._changed = False
        if self._front is None:
            self._front = await ENSURE_FRONT(self._start.run, summary="router and gateway")
        routed = self._start.role == "rollout"
        while True:
            front = await PUSH_REGISTRY(
                RegistryPush(
                    run=self._start.run,
                    role=self._start.role,
                    term=self._term,
                    document=self._registry.publish(self._models()),
                    router_workers=self._router_workers() if routed else None,
                    router_others=self._externals.workers() if routed else None,
                ),
                summary=f"publish {self._start.role}",
            )
            if front == self._front:
                return
            self._front = front  # it had to move; the document names the router's address

    def _router_workers(self) -> tuple[str, ...] | None:
        """Addresses the router must hold: those that answer; a sleeping pool keeps its own.

        A sleeping engine stays in the router's list, since its own fence refuses every request and
        registering again would cost seconds at each handover; it leaves the list when it stops.
        """
        groups = self._groups.values()
        if any(g.state in (GroupState.DRAINING, GroupState.SLEEPING) for g in groups):
            return None
        return tuple(
            r.base_url
            for g in groups
            for r in g.replicas
            if r.base_url and r.replica not in g.leaving
        )

    def _show(self) -> None:
        states = {g.state for g in self._groups.values()}
        state = states.pop() if len(states) == 1 else GroupState.ONLOADING
        show_state(state)
        doing = f"{self._start.role} is **{state}**" + (
            f" ({self._doing})." if self._doing else "."
        )
        rows = [
            (f"{g.model} replica {r.replica}", f"{r.state}, weights {r.weight_version}")
            for g in self._groups.values()
            for r in g.replicas
        ]
        rows += [
            (f"scale {each.operation_id}", f"{each.model}: {each.state}")
            for each in self._desk.at_work
        ]
        rows += self._autoscaler.rows() + self._externals.rows()
        show_details(doing, rows)
