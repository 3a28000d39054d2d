"""GpuLease: who may use a pool of GPUs. One per pool of a run; it outlives every step."""

from contextlib import suppress
from datetime import timedelta
from typing import get_args

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.engines import LeaseRole
from relax_infer.contracts.lease import (
    HolderLost,
    LeaseAnswer,
    LeaseCommand,
    LeaseInput,
    LeaseMethod,
    LeaseRequest,
    LeaseStatus,
    RoleResult,
)
from relax_infer.contracts.mailbox import Answer, Ask
from relax_infer.contracts.refs import WeightsRef
from relax_infer.machines import IllegalTransition, LeaseEvent, LeaseState
from workflows._failures import PERMANENT, TRANSIENT, fail, kind_of, text_of
from workflows._lease_book import LeaseRefused
from workflows._lease_sense import refuse_nonsense
from workflows._lease_waiting import LeaseWaiting
from workflows._versions import AUTO_UPGRADE

UPDATES_PER_HISTORY = 1500
GRANT_ATTEMPTS = 3
WAITERS = 4
WAIT_COMMITTED = timedelta(seconds=5)
METHODS: tuple[LeaseMethod, ...] = get_args(LeaseMethod)


@workflow.defn(name="GpuLease", versioning_behavior=AUTO_UPGRADE)
class GpuLease(LeaseWaiting):
    """Grants the pool to one role at a time, and takes it back only on proof.

    Other workflows send the signal ``ask`` (method = a lease method, payload = LeaseRequest),
    clients send the update of the same name; both run :meth:`_perform`.
    """

    @workflow.init
    def __init__(self, start: LeaseInput) -> None:
        super().__init__(start)
        self._waiters = 0
        self._updates = 0
        self._closing = False
        for method in METHODS:
            self._offer_update(method)

    @workflow.run
    async def run(self, start: LeaseInput) -> LeaseStatus:
        self._show()
        if self._left:
            await self._find_out()
        await workflow.wait_condition(lambda: self._closing or self._history_is_long)
        await workflow.wait_condition(workflow.all_handlers_finished)
        if self._closing:
            return self._book.status()
        workflow.continue_as_new(start.model_copy(update={"carried": self._carry()}))

    @property
    def _history_is_long(self) -> bool:
        long = workflow.info().is_continue_as_new_suggested() or self._updates > UPDATES_PER_HISTORY
        return self._operations.idle and long

    @property
    def _ends_with_its_handlers(self) -> bool:
        """Whether nothing keeps the lease from continuing as new but who waits for a commit."""
        return self._history_is_long and not self._book.blocked and not self._waiting

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
        role = self._book.roles.get(lost.role)
        if role is None:
            return
        if role.state is LeaseState.ACTIVE:
            self._book.record(lost.role, LeaseEvent.OPERATION_FAILED, workflow.time(), lost.why)
            await self._wait_until_known(lost.role)
        elif role.state is LeaseState.BLOCKED:
            self._hints.add(lost.role)  # in doubt already: what is lost now may have let go

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
        if self._operations.find(request) is None:
            await self._until_known(ask, request)
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
        refuse_nonsense(request, self._book)
        self._book.check(request)

    # --- one operation

    async def _perform(self, request: LeaseRequest) -> LeaseAnswer:
        """Carry it out once; the same operation id joins it or gets its recorded result."""
        if request.method == "wait_committed":
            return await self._wait_committed(request)
        try:
            known = self._operations.find(request)
        except LeaseRefused as error:
            raise fail(PERMANENT, str(error)) from error
        if known is not None:
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
            if await self._until_free_of_doubt(role):  # lost while something else was waited for
                self._check_still(role, request)
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
                self._check_still(role, request)
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
            self._check_still(role, request)

    def _check_still(self, role: str, request: LeaseRequest) -> None:
        """Legal as at first, unless the role turned out to be up; a batch that was abandoned
        meanwhile does not begin by itself."""
        if request.method == "begin_batch":
            batch = self._book.batch
            if batch is None or batch.batch != request.batch:
                raise LeaseRefused(f"batch {request.batch} was abandoned")
        if self._book.roles[role].state is not LeaseState.ACTIVE:
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

    # --- waiting for a commit

    async def _wait_committed(self, request: LeaseRequest) -> LeaseAnswer:
        """At most five seconds; outside callers repeat it with a new operation id. Those that come
        one after another must not keep the lease from continuing as new."""
        batch = request.batch or ""

        def over() -> bool:
            return batch in self._book.committed or self._book.failure_of(batch) is not None

        self._waiters += 1
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: over() or self._ends_with_its_handlers, timeout=WAIT_COMMITTED
            )
        self._waiters -= 1
        if not over():
            raise fail(TRANSIENT, f"batch {batch} is not committed yet: ask again")
        if batch not in self._book.committed:
            raise fail(PERMANENT, f"batch {batch} failed: {self._book.failure_of(batch)}")
        return LeaseAnswer()


def _request(command: LeaseCommand, method: LeaseMethod) -> LeaseRequest:
    return LeaseRequest.model_validate({**command.model_dump(), "method": method})


def _role(request: LeaseRequest) -> LeaseRole:
    assert request.role is not None
    return request.role
