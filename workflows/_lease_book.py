"""The rules of the lease, without Temporal: who holds which GPUs, fences, the batch gate.

Every method either changes the book by the tables of :mod:`relax_infer.machines` or raises
:class:`LeaseRefused` and changes nothing.
"""

from typing import Any

from relax_infer.contracts.engines import LEASE_ROLES
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.lease import (
    BatchRecord,
    LeaseRequest,
    LeaseStatus,
    LeaseTransition,
    RoleLease,
)
from relax_infer.machines import BATCH, LEASE, BatchEvent, BatchState, LeaseEvent, LeaseState

NUMBERS_PER_LEASE = 1_000_000_000
"""Of fence tokens and of operations: a lease that is begun anew goes on above every number that the
lost one can have given."""
COMMITS_REMEMBERED = 1024
_CAUSES_WHOLE, _CAUSE_SHORT = 64, 80
"""Given up batches whose cause is kept as it was told, and characters of those before."""
_TRANSITIONS_SHOWN = 120


Pairs = tuple[tuple[str, str], ...]


NOTHING_BLOCKED = "nothing is BLOCKED"
"""What a person's word is refused with where the lease waits for nobody."""


class LeaseRefused(ValueError):
    """The request is not legal now; the text says what the state is and what would be legal."""


class LeaseBook:
    """Who may use the GPUs of a run.

    Two roles that share a GPU exclude each other. ``apart`` names the pairs that share none: they
    may hold theirs at once. A role that shares with nobody is *resident*: nobody waits for it to
    let go, so it may keep its GPUs from one batch to the next.
    """

    def __init__(
        self, pool: str, roles: tuple[str, ...], apart: Pairs = (), *, fence_counter: int = 0
    ) -> None:
        unknown = [role for role in roles if role not in LEASE_ROLES]
        if unknown:
            raise LeaseRefused(f"Unknown inference role: {', '.join(unknown)}")
        self.pool = pool
        self._apart = {frozenset(pair) for pair in apart}
        self.fence_counter = fence_counter
        self.roles = {role: RoleLease(state=LEASE.initial) for role in roles}
        self.batch: BatchRecord | None = None
        self.committed: list[str] = []
        self.given_up: dict[str, str] = {}
        """Batches that a person gave up, and the cause of each; as many as commits."""
        self.transitions: list[LeaseTransition] = []

    @classmethod
    def begun_anew(
        cls,
        pool: str,
        roles: tuple[str, ...],
        apart: Pairs = (),
        *,
        run: str,
        lost: int,
        at: float,
    ) -> "LeaseBook":
        """The book of a lease that follows ``lost`` others, which were ended by hand. What they
        knew is gone: any role may hold its GPUs."""
        book = cls(pool, roles, apart, fence_counter=lost * NUMBERS_PER_LEASE)
        why = "its lease was ended by hand and begun anew"
        for role in book.roles:
            book.doubt(role, f"{run}.lost-{lost}.{role}", at, why)
        return book

    # --- what may happen

    def check(self, request: LeaseRequest) -> None:
        """Raise :class:`LeaseRefused` unless ``request`` is legal now."""
        getattr(self, f"_check_{request.method}")(request)

    def _check_begin_batch(self, request: LeaseRequest) -> None:
        batch = self._named_batch(request)
        if batch in self.committed or (self.batch and self.batch.batch == batch and self._pending):
            return
        self._refuse_failed()
        if self._pending:
            raise LeaseRefused(
                f"Only one pending closed batch: {self.batch.batch} is pending, {batch} must wait"  # type: ignore[union-attr]
            )
        self._need_asleep("begin a batch", "rollout")

    def _check_activate(self, request: LeaseRequest) -> None:
        role = self._named_role(request)
        self._refuse_failed()
        if not self._pending:
            raise LeaseRefused(f"{role} can be activated only for a pending batch; none is pending")
        self._need_free_for(role)

    def _check_acquire(self, request: LeaseRequest) -> None:
        role = self._named_role(request)
        if request.purpose is None:
            raise LeaseRefused("acquire needs a purpose: startup, train, weight_sync or eval")
        if self._pending and not (role == "trainer" and self.resident(role)):
            raise LeaseRefused(
                f"{role} cannot be acquired to {request.purpose} while batch"
                f" {self.batch.batch} is pending"  # type: ignore[union-attr]
            )
        if request.purpose == "train" and request.batch not in self.committed:
            raise LeaseRefused(f"batch {request.batch} is not committed: it must not be trained on")
        if self.roles[role].state is LeaseState.ACTIVE and not self.resident(role):
            raise LeaseRefused(f"{role} is acquired already: its holder must release it first")
        self._need_free_for(role)

    def _check_deactivate(self, request: LeaseRequest) -> None:
        role = self._named_role(request)
        state = self.roles[role].state
        if state not in (LeaseState.ACTIVE, LeaseState.SLEEPING):
            raise LeaseRefused(f"Cannot offload {role} in {state}; lease remains reserved")

    _check_release = _check_deactivate

    def _check_acknowledge_rollout_offloaded(self, request: LeaseRequest) -> None:
        batch = self._named_batch(request)
        if self.batch is None or self.batch.batch != batch:
            raise LeaseRefused(f"batch {batch} is not the current batch")
        state = self.roles["rollout"].state
        if state not in (LeaseState.ACTIVE, LeaseState.SLEEPING):
            raise LeaseRefused(f"Cannot acknowledge: rollout is {state}; lease remains reserved")

    def _check_begin_student_scoring(self, request: LeaseRequest) -> None:
        self._current(request)
        self._refuse_failed()
        if self.batch is not None and self.batch.student_scoring_started:
            return
        if self.batch is None or not self.batch.rollout_released:
            raise LeaseRefused("student scoring needs the generation's confirmed rollout offload")
        self._need_asleep("begin student scoring: every inference role must sleep", "rollout")

    def _check_commit_batch(self, request: LeaseRequest) -> None:
        batch = self._named_batch(request)
        if batch in self.committed:
            return
        self._current(request)
        self._refuse_failed()
        self._need_asleep("Cannot commit before inference offload", "trainer")

    def _check_fail_batch(self, request: LeaseRequest) -> None:
        self._current(request)
        if not (request.message or "").strip():
            raise LeaseRefused("fail_batch needs a message: the cause of the failure")
        if self.batch is not None and self.batch.state is BatchState.COMMITTED:
            raise LeaseRefused(f"batch {self.batch.batch} is committed; it cannot fail any more")

    def _check_wait_committed(self, request: LeaseRequest) -> None:
        self._named_batch(request)

    def _check_reconcile(self, request: LeaseRequest) -> None:
        if request.role is not None:
            self._named_role(request)

    def _check_resolve(self, request: LeaseRequest) -> None:
        if not (request.who or "").strip() or not (request.why or "").strip():
            raise LeaseRefused("resolve needs who looked and why it is safe")
        blocked = self.blocked
        if request.role is not None:
            self._named_role(request)
        if blocked and not request.confirm_released:
            raise LeaseRefused(
                f"{', '.join(blocked)} may still hold GPUs: look at the processes on the node"
                " (fence off or power down one that does not answer), then resolve with"
                " confirm_released"
            )
        if not blocked and not request.abandon:
            raise LeaseRefused(f"{NOTHING_BLOCKED}: there is nothing to resolve")

    # --- what happened

    def grant(self, role: str, grant_id: str, at: float) -> FenceToken:
        """Give the pool to a sleeping role under a new, higher fence token."""
        self._need_free_for(role)
        self.fence_counter += 1
        fence = FenceToken(counter=self.fence_counter, grant_id=grant_id)
        self._move(role, LeaseEvent.GRANTED, at, fence=fence)
        return fence

    def record(self, role: str, event: LeaseEvent, at: float, reason: str | None = None) -> None:
        """Advance one role's lease by what was confirmed, proved, or went wrong."""
        self._move(role, event, at, reason=reason)

    def doubt(self, role: str, grant_id: str, at: float, reason: str) -> None:
        """The lease was begun anew: what the role holds is not known any more. The token is above
        all that were given, so nothing that is on its way can still load."""
        self.fence_counter += 1
        fence = FenceToken(counter=self.fence_counter, grant_id=grant_id)
        self._move(role, LeaseEvent.MEMORY_LOST, at, fence=fence, reason=reason)

    def explain(self, role: str, reason: str) -> None:
        """Why a BLOCKED role is still so."""
        self.roles[role] = self.roles[role].model_copy(update={"reason": reason})

    def begin_batch(self, batch: str) -> None:
        self.given_up.pop(batch, None)
        self.batch = BatchRecord(batch=batch, state=BATCH.initial)

    def note_rollout_released(self) -> None:
        self._change_batch(rollout_released=True)

    def note_student_scoring(self) -> None:
        """The policy is brought up once more; its release is to be acknowledged once more."""
        self._change_batch(student_scoring_started=True, rollout_released=False)

    def commit_batch(self) -> None:
        """Open the gate; the batch joins the remembered commits."""
        assert self.batch is not None
        self._change_batch(
            state=BATCH.advance(self.batch.state, BatchEvent.COMMITTED_AFTER_PUBLISH)
        )
        self.committed.append(self.batch.batch)
        del self.committed[:-COMMITS_REMEMBERED]

    def fail_batch(self, message: str) -> None:
        """Close the gate for good; the first cause is kept and no lease is released."""
        assert self.batch is not None
        if self.batch.state is not BatchState.FAILED:
            state = BATCH.advance(self.batch.state, BatchEvent.FAILED_FOR_GOOD)
            self._change_batch(state=state, error=message)

    def abandon_batch(self) -> None:
        """A person gave the pending or failed batch up: a new one may begin.

        Who waits for this one hears the cause, also if they ask later."""
        if self.batch is not None:
            self.given_up[self.batch.batch] = self.batch.error or "a person gave it up"
            for oldest in list(self.given_up)[:-COMMITS_REMEMBERED]:
                del self.given_up[oldest]
            for earlier in list(self.given_up)[:-_CAUSES_WHOLE]:
                self.given_up[earlier] = self.given_up[earlier][:_CAUSE_SHORT]
        self.batch = None

    # --- what is

    @property
    def blocked(self) -> list[str]:
        return [r for r, lease in self.roles.items() if lease.state is LeaseState.BLOCKED]

    def in_doubt_for(self, role: str) -> list[str]:
        """BLOCKED roles that ``role`` would have to wait for, itself among them."""
        return [r for r in self.blocked if r == role or r in self._sharing(role)]

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(r for r, lease in self.roles.items() if LEASE.holds(lease.state))

    @property
    def holder(self) -> str | None:
        """The first of them: the only one where all roles share."""
        return next(iter(self.holders), None)

    @property
    def asleep(self) -> bool:
        return not self.holders

    def resident(self, role: str) -> bool:
        """Whether it shares no GPU with another role."""
        return not self._sharing(role)

    def failure_of(self, batch: str) -> str | None:
        """Why a batch will never be committed; None: it may be, or is."""
        current = self.batch
        if current is not None and current.batch == batch:
            return current.error if current.state is BatchState.FAILED else None
        return self.given_up.get(batch)

    def rollout_is_over(self, batch: str) -> bool:
        """Whether the policy's release was acknowledged, and nothing of the batch needs it again
        by itself: what is asked once more then is a repeat."""
        current = self.batch
        return current is not None and current.batch == batch and current.rollout_released

    def status(self) -> LeaseStatus:
        return LeaseStatus(
            pool=self.pool,
            fence_counter=self.fence_counter,
            roles=self.roles,
            batch=self.batch,
            holder=self.holder,
            holders=self.holders,
            apart=tuple(sorted((min(pair), max(pair)) for pair in self._apart)),
            transitions=tuple(self.transitions),
        )

    def carry(self) -> dict[str, Any]:
        """Everything, for continue-as-new."""
        return {
            **self.status().model_dump(mode="json"),
            "committed": self.committed,
            "given_up": self.given_up,
        }

    @classmethod
    def restore(cls, carried: dict[str, Any]) -> "LeaseBook":
        status = LeaseStatus.model_validate(carried)
        book = cls(status.pool, tuple(status.roles), status.apart)
        book.fence_counter = status.fence_counter
        book.roles = dict(status.roles)
        book.batch = status.batch
        book.transitions = list(status.transitions)
        book.committed = list(carried["committed"])
        book.given_up = dict(carried.get("given_up", {}))
        return book

    # --- pieces

    @property
    def _pending(self) -> bool:
        return self.batch is not None and self.batch.state is BatchState.PENDING

    def _move(
        self,
        role: str,
        event: LeaseEvent,
        at: float,
        *,
        fence: FenceToken | None = None,
        reason: str | None = None,
    ) -> None:
        lease = self.roles[role]
        state = LEASE.advance(lease.state, event)
        fence = fence or lease.fence
        kept = reason if state is LeaseState.BLOCKED else None
        self.roles[role] = RoleLease(state=state, fence=fence, reason=kept)
        counter = fence.counter if fence else 0
        self.transitions.append(
            LeaseTransition(at=at, role=role, event=event, state=state, fence=counter)
        )
        del self.transitions[:-_TRANSITIONS_SHOWN]

    def _change_batch(self, **changes: Any) -> None:
        assert self.batch is not None
        self.batch = self.batch.model_copy(update=changes)

    def _named_role(self, request: LeaseRequest) -> str:
        role = request.role
        if role is None or role not in self.roles:
            raise LeaseRefused(
                f"{request.method} needs a role of this pool: {', '.join(self.roles)}; got {role}"
            )
        return role

    @staticmethod
    def _named_batch(request: LeaseRequest) -> str:
        batch = request.batch
        if batch is None or not batch.strip() or batch != batch.strip():
            raise LeaseRefused(f"{request.method} needs a batch id (rollout_id); got {batch!r}")
        return batch

    def _current(self, request: LeaseRequest) -> None:
        batch = self._named_batch(request)
        if self.batch is None or self.batch.batch != batch:
            current = self.batch.batch if self.batch else "none"
            raise LeaseRefused(f"batch {batch} is not the current batch ({current})")

    def _refuse_failed(self) -> None:
        if self.batch is not None and self.batch.state is BatchState.FAILED:
            raise LeaseRefused(f"batch {self.batch.batch} failed: {self.batch.error}")

    def _sharing(self, role: str) -> list[str]:
        """Roles that use a GPU of ``role``'s, in order."""
        return [r for r in self.roles if r != role and frozenset((r, role)) not in self._apart]

    def _need_free_for(self, role: str) -> None:
        others = [r for r in self._sharing(role) if LEASE.holds(self.roles[r].state)]
        if others:
            shown = ", ".join(f"{r} ({self.roles[r].state})" for r in others)
            raise LeaseRefused(f"leases held by {shown}: {role} must wait for their release")
        state = self.roles[role].state
        if state not in (LeaseState.SLEEPING, LeaseState.ACTIVE):
            raise LeaseRefused(f"{role} is {state}: it can be granted only from SLEEPING")

    def _need_asleep(self, what: str, beside: str) -> None:
        """Everyone who shares a GPU with ``beside`` sleeps, and so does ``beside`` itself unless it
        shares with nobody."""
        sharing = self._sharing(beside)
        asked = [r for r in self.roles if r in sharing or (r == beside and sharing)]
        held = [r for r in asked if LEASE.holds(self.roles[r].state)]
        if held:
            shown = ", ".join(f"{r} ({self.roles[r].state})" for r in held)
            raise LeaseRefused(f"{what}: leases held by {shown}")
