"""The project's own lease book, on values that a search can keep and compare.

A :class:`Book` is what a ``LeaseBook`` says, without its history. :func:`after` restores the real
book, has it do one thing and reads it back. Each result also goes through continue-as-new, carried
as JSON and restored, which must change nothing: so the workflow may be restarted in every state.
"""

import json
from typing import Any, NamedTuple

from relax_infer.contracts.lease import LeaseRequest
from relax_infer.machines import LEASE, BatchState, IllegalTransition, LeaseEvent, LeaseState
from tests.machines.values import Token, Violation, memo
from workflows._lease_book import LeaseBook, LeaseRefused

REASON = "the model said so"


class Batch(NamedTuple):
    """The batch gate."""

    name: str
    state: BatchState
    rollout_released: bool


class RoleLease(NamedTuple):
    """One role's lease."""

    state: LeaseState
    token: Token | None


class Book(NamedTuple):
    """What a lease book says."""

    counter: int
    leases: tuple[tuple[str, RoleLease], ...]
    batch: Batch | None = None
    committed: tuple[str, ...] = ()

    def lease(self, role: str) -> RoleLease:
        return next(lease for name, lease in self.leases if name == role)

    def holds(self, role: str) -> bool:
        return LEASE.holds(self.lease(role).state)

    @property
    def blocked(self) -> tuple[str, ...]:
        return tuple(r for r, lease in self.leases if lease.state is LeaseState.BLOCKED)

    @property
    def asleep(self) -> bool:
        return not any(self.holds(role) for role, _ in self.leases)


def begun_anew(roles: tuple[str, ...], lost: int) -> Book:
    """Of a lease that follows ``lost`` others."""
    return _read(LeaseBook.begun_anew("default", roles, run="run", lost=lost, at=0.0))


def new_book(roles: tuple[str, ...]) -> Book:
    return _read(LeaseBook("default", roles))


def _read(real: LeaseBook) -> Book:
    leases = tuple(
        (role, RoleLease(lease.state, _token(lease.fence))) for role, lease in real.roles.items()
    )
    batch = real.batch and Batch(real.batch.batch, real.batch.state, real.batch.rollout_released)
    return Book(real.fence_counter, leases, batch or None, tuple(real.committed))


def _token(fence: Any) -> Token | None:
    return Token(fence.counter, fence.grant_id) if fence else None


def _restore(book: Book) -> LeaseBook:
    failed = book.batch is not None and book.batch.state is BatchState.FAILED
    return LeaseBook.restore(
        {
            "pool": "default",
            "fence_counter": book.counter,
            "roles": {
                role: {
                    "state": lease.state,
                    "fence": lease.token._asdict() if lease.token else None,
                    "reason": REASON if lease.state is LeaseState.BLOCKED else None,
                }
                for role, lease in book.leases
            },
            "batch": book.batch
            and {
                "batch": book.batch.name,
                "state": book.batch.state,
                "error": REASON if failed else None,
                "rollout_released": book.batch.rollout_released,
            },
            "holder": None,
            "committed": list(book.committed),
        }
    )


@memo
def after(book: Book, what: str, *args: Any) -> Book:
    """The book after the real one did ``what``: grant, record, begin_batch, commit_batch, ...

    Raises what the real one raises: LeaseRefused or IllegalTransition.
    """
    real = _restore(book)
    timed = what in ("grant", "record")
    getattr(real, what)(*args, *((0.0,) if timed else ()))
    _survives_continue_as_new(real)
    return _read(real)


def record(book: Book, role: str, event: LeaseEvent) -> Book:
    return after(book, "record", role, event)


def _survives_continue_as_new(real: LeaseBook) -> None:
    carried = real.carry()
    again = LeaseBook.restore(json.loads(json.dumps(carried)))
    if again.carry() != carried or _read(again) != _read(real):
        raise Violation("continue-as-new changed the book")


@memo
def refusal(book: Book, method: str, **fields: Any) -> str | None:
    """Why the real book refuses a request now; None: it would be carried out."""
    request = LeaseRequest.model_validate({"operation_id": "op", "method": method, **fields})
    try:
        _restore(book).check(request)
    except LeaseRefused as refused:
        return str(refused)
    return None


@memo
def in_doubt_for(book: Book, role: str) -> tuple[str, ...]:
    """Roles that a grant to ``role`` waits for."""
    return tuple(_restore(book).in_doubt_for(role))


@memo
def wrongly_granted(book: Book, holders: frozenset[str]) -> str | None:
    """A request that the book would carry out although the ground truth forbids it; None: none.

    ``holders`` are the roles that physically hold the GPUs.
    """
    person = {"who": "a person", "why": "looked"}
    pending = book.batch is not None and book.batch.state is BatchState.PENDING
    awake = {role for role, lease in book.leases if lease.state is not LeaseState.SLEEPING}
    for role, lease in book.leases:
        others = (holders | awake) - {role}
        for method, fields in (
            ("activate", {}),
            ("acquire", {"purpose": "weight_sync"}),
            ("acquire", {"purpose": "train", "batch": "step-1"}),
        ):
            if refusal(book, method, role=role, **fields) is not None:
                continue
            if others or lease.state is LeaseState.BLOCKED:
                return f"{method} of {role} is legal while {sorted(others)} hold or are unknown"
            if method == "acquire" and pending:
                return f"{role} is acquired while a batch is pending"
            if method == "activate" and not pending:
                return f"{role} is activated without a pending batch"
            if fields.get("purpose") == "train" and "step-1" not in book.committed:
                return "training is granted for a batch that is not committed"
        if _would_grant(book, role) and (others or role in awake):
            return f"{role} would be granted while another may hold"
        if lease.state not in (LeaseState.ACTIVE, LeaseState.SLEEPING):
            if refusal(book, "deactivate", role=role) is None:
                return f"{role} is {lease.state} and could be asked to let go again"
            batch = {"batch": book.batch.name if book.batch else "none"}
            if (
                refusal(book, "acknowledge_rollout_offloaded", **batch) is None
                and role == "rollout"
            ):
                return f"rollout is {lease.state} and its release could be acknowledged"
    for name in ("step-1", "step-2", "step-9"):
        new = name not in book.committed
        current = book.batch is not None and book.batch.name == name
        if new and refusal(book, "commit_batch", batch=name) is None:
            if not current or not pending:
                return f"{name} could be committed though it is not the pending batch"
            if holders or awake:
                return f"{name} could be committed while a role holds"
        if new and not current and refusal(book, "begin_batch", batch=name) is None:
            if pending or (book.batch and book.batch.state is BatchState.FAILED):
                return f"{name} could begin while another batch is not ended"
            if holders or awake:
                return f"{name} could begin while a role holds"
        if name in book.committed and refusal(book, "fail_batch", batch=name, message="x") is None:
            return f"{name} is committed and could still fail"
    if book.blocked and refusal(book, "resolve", **person, abandon=True) is None:
        return "a BLOCKED lease could be resolved without confirm_released"
    if refusal(book, "resolve", confirm_released=True) is None:
        return "somebody without a name could resolve"
    return None


def _would_grant(book: Book, role: str) -> bool:
    try:
        after(book, "grant", role, "a second client")
    except (LeaseRefused, IllegalTransition):
        return False
    return True
