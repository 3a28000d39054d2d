"""The long-lived workflows of a run, its servers, and the trainer that its lease drives.

The workflows are started with parent-close policy ABANDON: they outlive every continue-as-new of
the run.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from temporalio import workflow
from temporalio.exceptions import FailureError

from relax_infer.contracts.lease import (
    LeaseAnswer,
    LeaseInput,
    RoleInput,
    RoleOperation,
    RoleResult,
)
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import FrontAddress, RunPlan
from relax_infer.contracts.training import TrainerOperation
from workflows._calls import (
    CLOSE_TRANSFER_QUEUE,
    ENSURE_FRONT,
    FORGET_TRAINER,
    OPEN_TRANSFER_QUEUE,
    RELEASE_PLACEMENT,
    STOP_FRONT,
    STOP_TRAINER,
    Call,
)
from workflows._failures import text_of
from workflows._lasting import begin_lasting
from workflows._lease_client import LeaseClient
from workflows._mailbox import Mailbox, NobodyThere
from workflows._visible import attributes


async def begin_lease(plan: RunPlan, lost: int = 0) -> None:
    """Start the run's lease; ``lost``: how many of it were ended by hand before this one."""
    await begin_lasting(
        "GpuLease",
        LeaseInput(
            run=plan.run,
            roles=plan.roles,
            operation_timeout=plan.operation_timeout,
            reconcile_timeout=plan.reconcile_timeout,
            trainer=plan.trainer,
            apart=plan.apart,
            in_place=("rollout",) if plan.updates_in_place else (),
            lost=lost,
            groups=plan.groups if lost else (),
        ),
        id=f"{plan.run.run}.lease",
        search_attributes=attributes(run=plan.run.run),
        summary=f"who may use the GPUs of {plan.run.run}",
    )


def inference_roles(plan: RunPlan) -> tuple[str, ...]:
    return tuple(role for role in plan.roles if role != "trainer")


class Premises:
    """Brings the parts of a run up, and takes them down with proof.

    Args:
        plan: bound.
        show: told in words what is being done.
        ask_person: told what cannot be done and what goes on after their decision; gives their word
            that nothing is left of it, None if they did not say so.
        leaving: whether the run was stopped, so that nothing more needs to be brought up.
    """

    def __init__(
        self,
        plan: RunPlan,
        mail: Mailbox,
        lease: LeaseClient,
        show: Callable[[str], None],
        ask_person: Callable[[str, str], Awaitable[str | None]],
        *,
        leaving: Callable[[], bool],
    ) -> None:
        self._plan, self._mail, self._lease = plan, mail, lease
        self._run = plan.run.run
        self._show, self._ask_person, self._leaving = show, ask_person, leaving

    async def open(self) -> FrontAddress:
        """Lease, roles and servers; then every role once under the lease, so that what cannot work
        is found before the first step."""
        run = self._plan.run
        await begin_lease(self._plan)
        await self._start_roles(0)
        self._show("brings up router, gateway and TransferQueue")
        front, _, _ = await asyncio.gather(
            ENSURE_FRONT(run, summary="router and gateway"),
            OPEN_TRANSFER_QUEUE(run, summary="TransferQueue"),
            self._try_every_role(),
        )
        return front

    async def close(self) -> None:
        """Every role is proved gone before anything under it is deleted."""
        self._show("stops the roles")
        await self._stop_everyone()
        self._show("takes down TransferQueue, router, gateway and the placement group")
        with suppress(NobodyThere):  # ended by hand a moment ago: nobody holds anything any more
            await self._lease.ask_to_close()
        await self._take_down("TransferQueue's partitions", CLOSE_TRANSFER_QUEUE, "TransferQueue")
        await self._take_down("router and gateway", STOP_FRONT, "router and gateway")
        await self._take_down("the placement group", RELEASE_PLACEMENT, "placement group")

    async def _take_down(self, what: str, call: Call[RunRef, RunRef], summary: str) -> None:
        """What could not be taken down is still there: it is tried again once a person has looked.
        Their word that nothing is left of it goes for it, too."""
        while True:
            try:
                await call(self._plan.run, summary=summary)
            except FailureError as error:
                trouble = f"cannot take down {what}: {text_of(error)}"
                if await self._ask_person(trouble, f"takes down {what} again") is None:
                    continue
            return

    async def restart(self, number: int) -> None:
        """Every role is proved gone, then all begin anew; what is in the store and in the ledger
        stays.

        Args:
            number: of this restart, from 1; orders what the roles publish.
        """
        self._show("restarts every role")
        await self._stop_everyone(f"restart-{number}")
        await self._start_roles(number)
        await self._try_every_role()

    async def _let_go(self) -> LeaseAnswer:
        """Every role lets go under one lease, while all of them can still be asked; the trainer's
        answer. A lease that is ended by hand from then on is needed no more: one that began anew
        could not ask roles that are gone, and would keep their GPUs for ever."""
        while True:
            begun = self._lease.begun_anew
            for role in inference_roles(self._plan):
                await self._lease.take("deactivate", role)
            trainer = await self._lease.take("deactivate", "trainer")
            if self._lease.begun_anew == begun:
                return trainer

    # --- roles

    async def _try_every_role(self) -> None:
        """The policy is not among them: step 0 brings it up with its first weights."""
        for role in self._plan.roles:
            if self._leaving():
                return
            if role != "rollout":
                self._show(f"brings up {role} for the first time")
                await self._lease.take("acquire", role, purpose="startup")
                if self._plan.sharing(role):
                    await self._lease.release(role)

    async def _stop_everyone(self, occasion: str = "") -> None:
        trainer = await self._let_go()
        prefix = f"{occasion}." if occasion else ""
        await asyncio.gather(*(self._stop_role(r, prefix) for r in inference_roles(self._plan)))
        await self._stop_trainer(occasion or "1", trainer)

    async def _stop_role(self, role: str, prefix: str) -> None:
        """Asked again, under an id of its own, after a person has looked at what failed; their word
        that nothing is left reaches what waits for a proof."""
        word = None
        for number in itertools.count(1):
            attempt = f"{prefix}{number}"
            try:
                await self._end_role(role, attempt, word)
            except FailureError as error:
                trouble = f"cannot stop {role}: {text_of(error)}"
                word = await self._ask_person(trouble, f"stops {role} again")
            else:
                return

    async def _end_role(self, role: str, attempt: str, word: str | None) -> None:
        try:
            if word is not None:
                await self._ask(role, "resolve", attempt, word)
            await self._ask(role, "stop", attempt)
        except NobodyThere:
            if word is None:
                raise
            await self._stop_groups(role, attempt, word)

    async def _stop_groups(self, role: str, attempt: str, word: str) -> None:
        """In the place of a role whose workflow was ended by hand. The word stands for a group that
        is gone, too."""
        for group in self._plan.groups:
            if group.role == role:
                with suppress(NobodyThere):
                    await self._ask(f"{role}.{group.model}", "resolve", attempt, word)
                    await self._ask(f"{role}.{group.model}", "stop", attempt)

    async def _ask(
        self, who: str, method: Literal["stop", "resolve"], attempt: str, word: str | None = None
    ) -> None:
        """``stop``: every process of the role is gone, by proof, and its workflows have ended.
        ``resolve``: a person's word reaches it."""
        await self._mail.ask(
            f"{self._run}.{who}",
            method,
            RoleOperation(method=method, fence=None, word=word),
            RoleResult,
            operation_id=f"{workflow.info().run_id}:{who}:{method}:{attempt}",
            again=True,
        )

    async def _stop_trainer(self, occasion: str, last: LeaseAnswer) -> None:
        """As a role is stopped; a word for a trainer that nobody can reach stands for its end."""
        if last.fence is None:
            return
        word = None
        for number in itertools.count(1):
            attempt = occasion if number == 1 else f"{occasion}.{number}"
            operation = TrainerOperation(
                trainer=self._plan.trainer,
                operation_id=f"{workflow.info().run_id}:trainer:stop:{attempt}",
                fence=last.fence,
            )
            try:
                if word is not None:
                    resolve = f"{workflow.info().run_id}:trainer:resolve:{attempt}"
                    forgotten = await FORGET_TRAINER(
                        operation.model_copy(update={"operation_id": resolve}),
                        summary=f"word of {word}",
                    )
                    if forgotten.why is not None:
                        return
                await STOP_TRAINER(operation, summary="stop the trainer")
            except FailureError as error:
                trouble = f"cannot stop the trainer: {text_of(error)}"
                word = await self._ask_person(trouble, "stops the trainer again")
            else:
                return

    # --- workflows

    async def _start_roles(self, restarts: int) -> None:
        roles = inference_roles(self._plan)
        await asyncio.gather(*(self._start_role(role, restarts) for role in roles))

    async def _start_role(self, role: str, restarts: int) -> None:
        plan = self._plan
        await begin_lasting(
            "InferenceRole",
            RoleInput(
                run=plan.run,
                role=role,
                groups=tuple(g for g in plan.groups if g.role == role),
                operation_timeout=plan.operation_timeout,
                restarts=restarts,
                shares_with=plan.sharing(role),
                autoscale=plan.autoscale.get(role, {}),
            ),
            id=f"{self._run}.{role}",
            search_attributes=attributes(run=self._run, role=role),
            summary=f"{role} of {self._run}",
            patient=restarts > 0,
        )
