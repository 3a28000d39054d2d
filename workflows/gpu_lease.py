"""GpuLease: who may use a pool of GPUs. One per pool of a run; it outlives every step."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any, get_args

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from relax_infer.contracts.engines import LeaseRole, OffloadCheck
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import (
    HolderLost,
    LeaseAnswer,
    LeaseCommand,
    LeaseInput,
    LeaseMethod,
    LeaseRequest,
    LeaseStatus,
    RoleOperation,
    RoleResult,
)
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.refs import WeightsRef
from relax_infer.machines import IllegalTransition, LeaseEvent, LeaseState
from workflows._calls import CONFIRM_OFFLOAD
from workflows._failures import PERMANENT, TRANSIENT, UNCONFIRMED, fail, kind_of, text_of
from workflows._lease_book import LeaseBook, LeaseRefused
from workflows._mailbox import Mailbox
from workflows._operations import Operations
from workflows._trainer_role import TrainerRole
from workflows._visible import show_details, show_state

UPDATES_PER_HISTORY = 1500
GRANT_ATTEMPTS = 3
WAITERS = 4
WAIT_COMMITTED = timedelta(seconds=5)
METHODS: tuple[LeaseMethod, ...] = get_args(LeaseMethod)


@workflow.defn(name="GpuLease")
class GpuLease:
    """Grants the pool to one role at a time, and takes it back only on proof.

    Other workflows send the signal ``ask`` (method = a lease method, payload = LeaseRequest),
    clients send the update of the same name; both run :meth:`_perform`.
    """

    @workflow.init
    def __init__(self, start: LeaseInput) -> None:
        carried: dict[str, Any] = start.carried or {}
        self._start = start
        self._book = (
            LeaseBook.restore(carried["book"])
            if carried
            else LeaseBook(start.pool, start.roles, start.apart)
        )
        self._mail = Mailbox(carried.get("answers"))
        self._operations = Operations(carried.get("operations"))
        self._resolved_by: dict[str, str] = {}
        self._proved: dict[str, RoleResult] = {
            role: RoleResult.model_validate(seen)
            for role, seen in carried.get("proved", {}).items()
        }
        """What each role said when it was last known to be up."""
        self._waiters = 0
        self._updates = 0
        self._asked = int(carried.get("asked", 0))
        self._closing = False
        self._reconciling: set[str] = set()
        self._hints: set[str] = set()
        self._doubted: set[str] = set(carried.get("doubted", []))
        """Roles whose evidence of release contradicted them."""
        self._trainer = TrainerRole(start.trainer) if start.trainer else None
        for method in METHODS:
            self._offer_update(method)

    @workflow.run
    async def run(self, start: LeaseInput) -> LeaseStatus:
        self._show()
        await workflow.wait_condition(lambda: self._closing or self._history_is_long)
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self._closing:
            return self._book.status()
        workflow.continue_as_new(
            start.model_copy(
                update={
                    "carried": {
                        "book": self._book.carry(),
                        "answers": self._mail.carry(),
                        "operations": self._operations.carry(),
                        "asked": self._asked,
                        "doubted": sorted(self._doubted),
                        "proved": {
                            role: seen.model_dump(mode="json")
                            for role, seen in self._proved.items()
                        },
                    }
                }
            )
        )

    @property
    def _history_is_long(self) -> bool:
        long = workflow.info().is_continue_as_new_suggested() or self._updates > UPDATES_PER_HISTORY
        return self._operations.idle and long

    # --- ways in

    @workflow.signal
    async def ask(self, ask: Ask) -> None:
        await self._mail.serve(ask, self._answer)

    @workflow.signal
    def answer(self, answer: Answer) -> None:
        if not self._mail.deliver(answer):
            self._hints.update(self._book.blocked)  # one that comes late proves nothing: look

    @workflow.signal
    async def holder_lost(self, lost: HolderLost) -> None:
        """A role that holds the pool waits for proof or a person; what holds it is in doubt."""
        if self._book.roles[lost.role].state is LeaseState.ACTIVE:
            self._book.record(lost.role, LeaseEvent.OPERATION_FAILED, workflow.time(), lost.why)
            await self._wait_until_known(lost.role)

    @workflow.signal
    def holder_known(self, role: str) -> None:
        """A role knows again where its engines stand: worth a probe."""
        self._hints.add(role)

    @workflow.query
    def state(self) -> LeaseStatus:
        return self._book.status()

    def _offer_update(self, method: LeaseMethod) -> None:
        async def handle(command: LeaseCommand) -> LeaseAnswer:
            self._updates += 1
            return await self._perform(_request(command, method))

        def validate(command: LeaseCommand) -> None:
            self._refuse_illegal(_request(command, method))

        workflow.set_update_handler(  # pyright: ignore[reportUnknownMemberType]
            method, handle, validator=validate
        )

    async def _answer(self, ask: Ask) -> LeaseAnswer:
        if ask.method == "close":
            return self._close()
        if self._closing:
            raise LeaseRefused("the lease is closed: the run has ended")
        request = LeaseRequest.model_validate({**ask.payload})
        if request.method in ("deactivate", "release", "acknowledge_rollout_offloaded"):
            # A workflow waits where a person is refused: it cannot do anything else.
            role = request.role or "rollout"
            await workflow.wait_condition(lambda: role not in self._book.blocked)
        return await self._perform(request)

    def _close(self) -> LeaseAnswer:
        if not self._book.asleep:
            raise LeaseRefused(f"{', '.join(self._book.holders)} still hold GPUs: the lease stays")
        self._closing = True
        return LeaseAnswer()

    def _refuse_illegal(self, request: LeaseRequest) -> None:
        if self._operations.find(request) is not None:
            return
        if request.method == "wait_committed" and self._waiters >= WAITERS:
            raise LeaseRefused(f"{WAITERS} callers wait already: one per trainer group may wait")
        self._book.check(request)

    # --- one operation

    async def _perform(self, request: LeaseRequest) -> LeaseAnswer:
        """Carry it out once; the same operation id joins it or gets its recorded result."""
        if request.method == "wait_committed":
            return await self._wait_committed(request)
        if (known := self._operations.find(request)) is not None:
            await workflow.wait_condition(lambda: known.ended)
            return known.result()
        operation = self._operations.begin(request)
        try:
            self._book.check(request)
            operation.answer = await self._carry_out(request)
        except (LeaseRefused, IllegalTransition) as error:
            operation.error = (PERMANENT, str(error))
        except ApplicationError as error:
            operation.error = (kind_of(error), text_of(error))
        self._operations.forget_old()
        self._show()
        return operation.result()

    async def _carry_out(self, request: LeaseRequest) -> LeaseAnswer:
        book, batch = self._book, request.batch
        match request.method:
            case "begin_batch":
                if batch in book.committed or book.rollout_is_over(batch or ""):
                    return LeaseAnswer()
                if book.batch is None or book.batch.batch != batch:
                    book.begin_batch(batch or "")
                return await self._grant("rollout", request)
            case "activate" | "acquire":
                return await self._grant(_role(request), request)
            case "deactivate" | "release":
                return await self._release(_role(request))
            case "acknowledge_rollout_offloaded":
                if book.rollout_is_over(batch or ""):
                    return LeaseAnswer()  # a repeat must not end what was granted since
                released = await self._release("rollout")
                if book.batch is not None and book.batch.batch == batch:
                    book.note_rollout_released()
                return released
            case "begin_student_scoring":
                started = book.batch is not None and book.batch.student_scoring_started
                if started and book.rollout_is_over(batch or ""):
                    return LeaseAnswer()
                book.note_student_scoring()
                return await self._grant("rollout", request)
            case "commit_batch":
                if batch not in book.committed:
                    book.commit_batch()
            case "fail_batch":
                book.fail_batch(request.message or "")
            case "reconcile":
                for role in book.blocked:
                    if request.role in (None, role):
                        await self._reconcile_once(role)
            case "resolve":
                await self._resolve(request)
            case "wait_committed":
                raise AssertionError("waited for elsewhere")
        return LeaseAnswer()

    async def _grant(self, role: str, request: LeaseRequest) -> LeaseAnswer:
        """Grant, have the role load, and answer when it confirmed that it is up."""
        failures, updated = 0, False
        while True:
            if self._book.roles[role].state is LeaseState.ACTIVE:
                if self._holds_weights(role, request.weights):
                    return self._found_active(role)
                if role in self._start.in_place and not updated:
                    updated = True
                    await self._update(role, request)
                    continue
                await self._release(role)
            attempt = f"{request.operation_id}.{failures}" if failures else request.operation_id
            fence = self._book.grant(role, attempt, workflow.time())
            self._show()
            try:
                result = await self._have(role, "onload", fence, request.weights)
            except ApplicationError as error:
                failures += 1
                await self._block_until_known(role, error)
                active = self._book.roles[role].state is LeaseState.ACTIVE
                if not active and (failures >= GRANT_ATTEMPTS or kind_of(error) == PERMANENT):
                    raise
                if not active:
                    self._check_still(request)
                continue
            self._book.record(role, LeaseEvent.ONLOAD_CONFIRMED, workflow.time())
            self._proved[role] = result
            return LeaseAnswer(
                fence=fence,
                weight_version=result.weight_version,
                weights_digest=result.weights_digest,
                holders=result.holders,
            )

    async def _update(self, role: str, request: LeaseRequest) -> None:
        """Other weights within the grant. Where that fails, the caller looks at what became of the
        role: up, it lets go and is granted anew with the weights."""
        try:
            fence = self._book.roles[role].fence
            self._proved[role] = await self._have(role, "update", fence, request.weights)
        except ApplicationError as error:
            self._proved.pop(role, None)
            if self._book.roles[role].state is LeaseState.ACTIVE:
                why = text_of(error)
                self._book.record(role, LeaseEvent.OPERATION_FAILED, workflow.time(), why)
                await self._wait_until_known(role)
            else:
                await workflow.wait_condition(lambda: role not in self._book.blocked)
            if self._book.roles[role].state is not LeaseState.ACTIVE:
                self._check_still(request)

    def _check_still(self, request: LeaseRequest) -> None:
        """Legal as at first; a batch that was abandoned meanwhile does not begin by itself."""
        if request.method == "begin_batch":
            batch = self._book.batch
            if batch is None or batch.batch != request.batch:
                raise LeaseRefused(f"batch {request.batch} was abandoned")
        self._book.check(request)

    def _holds_weights(self, role: str, weights: WeightsRef | None) -> bool:
        seen = self._proved.get(role, RoleResult())
        return weights is None or seen.weight_version == weights.version

    def _found_active(self, role: str) -> LeaseAnswer:
        """Up already, or proved to be up by a probe after an answer was lost."""
        seen = self._proved.get(role, RoleResult())
        return LeaseAnswer(
            fence=self._book.roles[role].fence,
            weight_version=seen.weight_version,
            weights_digest=seen.weights_digest,
            holders=seen.holders,
        )

    async def _release(self, role: str) -> LeaseAnswer:
        """Take the pool back; answers only when the release is confirmed, proved or resolved."""
        while self._book.roles[role].state is not LeaseState.SLEEPING:
            lease = self._book.roles[role]
            if lease.state is LeaseState.BLOCKED:
                await workflow.wait_condition(lambda: role not in self._book.blocked)
                continue
            if lease.state is not LeaseState.ACTIVE:
                raise LeaseRefused(
                    f"Cannot offload {role} in {lease.state}; lease remains reserved"
                )
            assert lease.fence is not None
            self._book.record(role, LeaseEvent.DRAIN_STARTED, workflow.time())
            self._show()
            try:
                result = await self._have(role, "offload", lease.fence, None)
            except ApplicationError as error:
                await self._block_until_known(role, error)
                continue
            if (wrong := await self._judge(role, lease.fence, result)) is not None:
                # Its engines say that they let go and the evidence says that they did not: only a
                # person can tell.
                self._doubted.add(role)
                await self._block_until_known(role, wrong)
                continue
            self._book.record(role, LeaseEvent.RELEASE_CONFIRMED, workflow.time())
            return LeaseAnswer(fence=lease.fence, evidence=result.evidence, holders=result.holders)
        return LeaseAnswer(
            fence=self._book.roles[role].fence, resolved_by=self._resolved_by.get(role)
        )

    async def _judge(
        self, role: str, fence: FenceToken, result: RoleResult
    ) -> ApplicationError | None:
        """Read the evidence of a release before anybody else is granted; None: it proves it."""
        if not result.holders:
            return None
        check = OffloadCheck.model_validate(
            {"role": role, "fence": fence, "evidence": result.evidence, "holders": result.holders}
        )
        try:
            await CONFIRM_OFFLOAD[role](check, summary=f"evidence of {role}")
        except ActivityError as error:
            return fail(PERMANENT, text_of(error))
        return None

    async def _have(
        self,
        role: str,
        method: str,
        fence: FenceToken | None,
        weights: WeightsRef | None,
        word: str | None = None,
    ) -> RoleResult:
        """Have a role carry out ``method`` under ``fence``."""
        operation = RoleOperation.model_validate(
            {"method": method, "fence": fence, "weights": weights, "word": word}
        )
        self._asked += 1
        operation_id = f"{self._start.run.run}.lease-{self._start.pool}.{self._asked}.{method}"
        if role == "trainer":
            assert self._trainer is not None
            return await self._trainer.perform(operation, operation_id)
        return await self._mail.ask(
            f"{self._start.run.run}.{role}",
            method,
            operation,
            RoleResult,
            operation_id=operation_id,
            timeout=self._start.operation_timeout,
        )

    # --- BLOCKED

    async def _block_until_known(self, role: str, error: ApplicationError) -> None:
        event = (
            LeaseEvent.TIMED_OUT if kind_of(error) == UNCONFIRMED else LeaseEvent.OPERATION_FAILED
        )
        self._book.record(role, event, workflow.time(), reason=text_of(error))
        await self._wait_until_known(role)

    async def _wait_until_known(self, role: str) -> None:
        """Reserve the pool until a probe or a person says where the role stands."""
        self._show()
        # A timer, not a clock: after a workflow task that timed out the clock shows the time of an
        # earlier one, and another in replay.
        patience = asyncio.create_task(workflow.sleep(self._start.reconcile_timeout))
        try:
            await self._probe_until_known(role, patience)
        finally:
            patience.cancel()

    async def _probe_until_known(self, role: str, patience: "asyncio.Task[None]") -> None:
        pause, told = 0.5, False
        while role in self._book.blocked:
            self._hints.discard(role)
            await self._reconcile_once(role)
            if role not in self._book.blocked:
                break
            if not told and patience.done():
                await self._tell_run("lease_blocked")
                told = True
            # A person may take days: probes of our own end then, and the role says when to look.
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: role in self._hints or role not in self._book.blocked,
                    timeout=None if told else timedelta(seconds=pause),
                )
            pause = min(2 * pause, 10.0)
        if told:
            await self._tell_run("lease_unblocked")
        self._show()

    async def _reconcile_once(self, role: str) -> None:
        """One probe under the role's token; only what it proves changes the book, a release by its
        evidence."""
        lease = self._book.roles[role]
        if lease.fence is None or role in self._reconciling or role in self._doubted:
            return
        self._reconciling.add(role)
        try:
            result = await self._have(role, "probe", lease.fence, None)
            asleep = result.state in ("SLEEPING", "STOPPED")
            wrong = await self._judge(role, lease.fence, result) if asleep else None
        except ApplicationError as error:
            workflow.logger.warning("probe of %s proved nothing: %s", role, text_of(error))
            return
        finally:
            self._reconciling.discard(role)
        if not self._is_blocked_under(role, lease.fence):
            return  # an answer about an earlier grant
        if wrong is not None:
            self._doubted.add(role)
            self._book.explain(role, text_of(wrong))
        elif asleep:
            self._book.record(role, LeaseEvent.RELEASE_PROVED, workflow.time())
        elif result.state == "READY":
            self._proved[role] = result
            self._book.record(role, LeaseEvent.ACTIVE_PROVED, workflow.time())

    def _is_blocked_under(self, role: str, fence: FenceToken | None) -> bool:
        """Still, after something was waited for."""
        now = self._book.roles[role]
        return now.state is LeaseState.BLOCKED and now.fence == fence

    async def _resolve(self, request: LeaseRequest) -> None:
        for role in self._book.blocked:
            if request.role in (None, role):
                await self._resolve_role(role, f"{request.who}: {request.why}")
        batch = self._book.batch
        meant = batch is not None and request.batch in (None, batch.batch)
        if request.abandon and meant and not self._book.blocked:
            self._book.abandon_batch()

    async def _resolve_role(self, role: str, word: str) -> None:
        """The word stands for what cannot be proved; what can answer lets go, or goes on."""
        fence, told = self._book.roles[role].fence, role in self._doubted
        result = await self._have(role, "resolve", fence, None, word=word)
        state, asleep = result.state, result.state in ("SLEEPING", "STOPPED")
        if asleep and result.evidence and fence is not None and not told:
            # A person who was not told of a contradiction has not looked for what it is about.
            wrong = await self._judge(role, fence, result)
            if wrong is not None and self._is_blocked_under(role, fence):
                self._doubted.add(role)
                self._book.explain(role, text_of(wrong))
                raise fail(PERMANENT, f"{text_of(wrong)} Look again; the next word stands.")
        if not self._is_blocked_under(role, fence):
            return  # a probe proved it meanwhile
        self._doubted.discard(role)
        if asleep:
            self._book.record(role, LeaseEvent.RESOLVED_BY_OPERATOR, workflow.time())
            self._resolved_by[role] = word
        elif state == "READY":
            await self._reconcile_once(role)
        else:
            raise fail(UNCONFIRMED, f"{role} is {state} also after the word of {word}")

    async def _tell_run(self, signal: str) -> None:
        reasons = "; ".join(f"{r}: {self._book.roles[r].reason}" for r in self._book.blocked)
        try:
            await workflow.get_external_workflow_handle(self._start.run.run).signal(signal, reasons)
        except ApplicationError as error:
            workflow.logger.warning("the run cannot be told that the lease waits: %s", error)

    # --- waiting for a commit

    async def _wait_committed(self, request: LeaseRequest) -> LeaseAnswer:
        """At most five seconds; outside callers repeat it with a new operation id."""
        batch = request.batch or ""

        def over() -> bool:
            return batch in self._book.committed or self._book.failure_of(batch) is not None

        self._waiters += 1
        try:
            await workflow.wait_condition(over, timeout=WAIT_COMMITTED)
        except TimeoutError:
            raise fail(TRANSIENT, f"batch {batch} is not committed yet: ask again") from None
        finally:
            self._waiters -= 1
        if batch not in self._book.committed:
            raise fail(PERMANENT, f"batch {batch} failed: {self._book.failure_of(batch)}")
        return LeaseAnswer()

    # --- pieces

    def _show(self) -> None:
        book = self._book
        if book.blocked:
            show_state(LeaseState.BLOCKED)
            reasons = "; ".join(f"{r}: {book.roles[r].reason}" for r in book.blocked)
            doing = (
                f"**BLOCKED.** {reasons}. The pool stays reserved; probes go on for"
                f" {self._start.reconcile_timeout:.0f} s, then a person decides:\n\n"
                f"`relax-infer resolve {self._start.run.run} --who NAME --why TEXT"
                " --confirm-released`"
            )
        elif book.holders:
            held = [f"{role} {book.roles[role].state}" for role in book.holders]
            show_state(", ".join(held))
            doing = f"Held by **{'**, **'.join(held)}**."
        else:
            show_state("FREE")
            doing = "Nobody holds the pool."
        batch = f"{book.batch.batch}: {book.batch.state}" if book.batch else "none"
        rows = [(role, str(lease.state)) for role, lease in book.roles.items()]
        show_details(doing, [*rows, ("batch", batch), ("fence", str(book.fence_counter))])


def _request(command: LeaseCommand, method: LeaseMethod) -> LeaseRequest:
    return LeaseRequest.model_validate({**command.model_dump(), "method": method})


def _role(request: LeaseRequest) -> LeaseRole:
    assert request.role is not None
    return request.role
