"""Ways to break the rules, one at a time, and what catches a break.

A mutant changes the project's own code or tables in place. It is caught when a promise is broken
or when a state can no longer come to a good end; searches of growing size are tried in turn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

import workflows.engine_lifecycle as lifecycle_module
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import BATCH, GROUP, LEASE, REPLICA, GroupEvent, LeaseEvent, Machine
from relax_infer.machines import ReplicaState as R
from tests.machines import host, values
from tests.machines.explore import Broken, explore
from tests.machines.model import Config
from tests.machines.moves import _Next
from workflows._lease_book import LeaseBook
from workflows.engine_lifecycle import EngineLifecycle

Edge = tuple[StrEnum, StrEnum]
Mutate = Callable[[pytest.MonkeyPatch], None]

MACHINES: tuple[Machine[Any, Any], ...] = (LEASE, BATCH, REPLICA, GROUP)
_TWO = ("rollout", "trainer")
SEARCHES = (
    Config(roles=_TWO, faults=1),
    Config(roles=("rollout", "genrm", "trainer"), faults=1),
    Config(roles=_TWO, faults=1, replicas=2),
    Config(roles=_TWO, faults=3, only=frozenset({"timeout"})),
    Config(roles=_TWO, faults=2),
)
"""From small to large; a mutant that survives all of them survives."""


@contextmanager
def fresh() -> Iterator[pytest.MonkeyPatch]:
    """Rules that may be changed and are as before afterwards."""
    tables = [(machine, machine.transitions) for machine in MACHINES]
    with pytest.MonkeyPatch.context() as patch:
        values.forget()
        try:
            yield patch
        finally:
            for machine, table in tables:
                _set_transitions(machine, dict(table))
            values.forget()


def what_catches(mutate: Mutate) -> str | None:
    """The first line of the counterexample; None: the mutant survives."""
    with fresh() as patch:
        mutate(patch)
        for config in SEARCHES:
            try:
                explore(config)
            except Broken as broken:
                return str(broken).splitlines()[0]
    return None


def without(machine: Machine[Any, Any], edge: Edge) -> Mutate:
    """The table without one transition."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        left = {key: to for key, to in machine.transitions.items() if key != edge}
        _set_transitions(machine, left)

    return mutate


def with_forbidden(machine: Machine[Any, Any], edge: Edge) -> Mutate:
    """The table with a forbidden transition, to where its event leads elsewhere."""
    state, event = edge
    target = next(to for (_, e), to in machine.transitions.items() if e == event)

    def mutate(patch: pytest.MonkeyPatch) -> None:
        _set_transitions(machine, {**machine.transitions, (state, event): target})

    return mutate


def _set_transitions(machine: Machine[Any, Any], table: dict[Any, Any]) -> None:
    object.__setattr__(machine, "transitions", MappingProxyType(table))


def holds_too_little(machine: Machine[Any, Any], state: StrEnum) -> Mutate:
    """A state that no longer counts as holding."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        holds = type(machine).holds
        patch.setattr(
            Machine,
            "holds",
            lambda self, at: holds(self, at) and not (self is machine and at is state),
        )

    return mutate


def replaced(owner: Any, name: str, value: Any) -> Mutate:
    return lambda patch: patch.setattr(owner, name, value)


def ignored(owner: Any, name: str) -> Mutate:
    """A check or a step that does nothing."""
    return replaced(owner, name, lambda *_, **__: None)


async def _nothing(*_: object, **__: object) -> None:
    return None


# --- guards of the lease book


def _same_counter(self: LeaseBook, role: str, grant_id: str, at: float) -> FenceToken:
    fence = _GRANT(self, role, grant_id, at)
    self.fence_counter -= 1
    return fence


def _grant_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Grants whatever the others hold, also while a role is BLOCKED."""
    patch.setattr(LeaseBook, "_need_free_for", lambda self, role: None)


def _forgetting(field: str, value: Any) -> Mutate:
    restore = LeaseBook.restore.__func__

    def forgetful(cls: type[LeaseBook], carried: dict[str, Any]) -> LeaseBook:
        book = restore(cls, carried)
        setattr(book, field, value() if callable(value) else value)
        return book

    return replaced(LeaseBook, "restore", classmethod(forgetful))


_GRANT = LeaseBook.grant
_CHECK_RESOLVE = LeaseBook._check_resolve


def _resolve_unconfirmed(self: LeaseBook, request: Any) -> None:
    _CHECK_RESOLVE(self, request.model_copy(update={"confirm_released": True}))


def _commit_twice(self: LeaseBook) -> None:
    _COMMIT(self)
    assert self.batch is not None
    self.committed.append(self.batch.batch)


_COMMIT = LeaseBook.commit_batch

LEASE_GUARDS: dict[str, Mutate] = {
    "grant-while-another-holds": _grant_unchecked,
    "commit-while-a-role-holds": ignored(LeaseBook, "_need_all_asleep"),
    "fence-counter-does-not-grow": replaced(LeaseBook, "grant", _same_counter),
    "begin-unchecked": ignored(LeaseBook, "_check_begin_batch"),
    "activate-unchecked": ignored(LeaseBook, "_check_activate"),
    "acquire-unchecked": ignored(LeaseBook, "_check_acquire"),
    "deactivate-unchecked": ignored(LeaseBook, "_check_deactivate"),
    "acknowledge-unchecked": ignored(LeaseBook, "_check_acknowledge_rollout_offloaded"),
    "commit-unchecked": ignored(LeaseBook, "_check_commit_batch"),
    "fail-unchecked": ignored(LeaseBook, "_check_fail_batch"),
    "resolve-unchecked": ignored(LeaseBook, "_check_resolve"),
    "resolve-without-confirm-released": replaced(LeaseBook, "_check_resolve", _resolve_unconfirmed),
    "any-batch-is-the-current-one": ignored(LeaseBook, "_current"),
    "a-failed-batch-goes-on": ignored(LeaseBook, "_refuse_failed"),
    "commit-not-remembered": replaced(
        LeaseBook,
        "commit_batch",
        lambda self: self._change_batch(state=BATCH.states.COMMITTED),
    ),
    "commit-counted-twice": replaced(LeaseBook, "commit_batch", _commit_twice),
    "abandoned-batch-stays": ignored(LeaseBook, "abandon_batch"),
    "restart-forgets-the-fence-counter": _forgetting("fence_counter", 0),
    "restart-forgets-the-batch": _forgetting("batch", None),
    "restart-forgets-the-commits": _forgetting("committed", list),
    "blocked-does-not-hold": holds_too_little(LEASE, LEASE.states.BLOCKED),
    "onloading-does-not-hold": holds_too_little(LEASE, LEASE.states.ONLOADING),
    "draining-does-not-hold": holds_too_little(LEASE, LEASE.states.DRAINING),
    "active-does-not-hold": holds_too_little(LEASE, LEASE.states.ACTIVE),
}


# --- engines and groups


def _admit_lower(self: FenceMemory, token: FenceToken) -> None:
    self.seen = token


async def _end_without_proof(self: Any, *_: object) -> None:
    self.gate = False
    holding = self.trouble == "prove" and self.gpu in values.HOLDING
    self.gpu, self.kind = (values.Gpu.ORPHAN if holding else values.Gpu.NONE), ""


async def _partial_is_ready(self: Any, tags: Any, token: FenceToken) -> None:
    missing = [tag for tag in tags if tag not in self._resident]
    if missing:
        try:
            await self._control.resume(missing, token, 1.0)
        except UnconfirmedError:
            self._control.gpu = values.Gpu.PARTIAL
        self._resident.update(missing)


def _proved_without_token(report: Any, fence: Any) -> GroupEvent | None:
    believed = report.replicas[0].fence
    same = [r.model_copy(update={"fence": believed}) for r in report.replicas]
    return _PROVED(report.model_copy(update={"replicas": tuple(same)}), believed)


def _proved_by_one(report: Any, fence: Any) -> GroupEvent | None:
    proofs = [_PROVED(report.model_copy(update={"replicas": (r,)}), fence) for r in report.replicas]
    return next((proof for proof in proofs if proof is not None), None)


_PROVED = lifecycle_module._proved


def _failed_counts_as_gone(report: Any, fence: Any) -> GroupEvent | None:
    dead = {R.DEAD, R.FAILED}
    return GroupEvent.RELEASE_PROVED if {r.state for r in report.replicas} <= dead else None


async def _trusts_a_failed_engine(self: Any, op: Any) -> Any:
    return await self._evidence(op.fence, None, None, gone=True)


ENGINE_GUARDS: dict[str, Mutate] = {
    "engine-takes-a-lower-token": replaced(FenceMemory, "admit", _admit_lower),
    "engine-forgets-its-token-with-its-actor": ignored(host._Host, "write_fence"),
    "actor-does-not-look-for-what-was-left": ignored(host._Host, "holder"),
    "killed-without-proof": replaced(host._Host, "end", _end_without_proof),
    "failed-engine-is-taken-at-its-word": replaced(EngineReplica, "_gone", _trusts_a_failed_engine),
    "partial-onload-is-ready": replaced(EngineReplica, "_resume", _partial_is_ready),
    "failed-onload-changes-no-state": ignored(EngineReplica, "_fail"),
    "death-is-not-noticed": ignored(EngineReplica, "_notice_death"),
    "failed-does-not-hold": holds_too_little(REPLICA, R.FAILED),
    "blocked-group-does-not-hold": holds_too_little(GROUP, GROUP.states.BLOCKED),
    "one-replica-speaks-for-all": ignored(EngineLifecycle, "_need_all"),
    "probe-under-any-token": replaced(lifecycle_module, "_proved", _proved_without_token),
    "probe-of-one-proves-all": replaced(lifecycle_module, "_proved", _proved_by_one),
    "probe-takes-failed-for-gone": replaced(lifecycle_module, "_proved", _failed_counts_as_gone),
    "probe-proves-nothing": replaced(lifecycle_module, "_proved", lambda report, fence: None),
    "resolve-does-nothing": replaced(EngineLifecycle, "_resolve", _nothing),
    "lifecycle-takes-a-lower-token": ignored(EngineLifecycle, "_admit"),
}


# --- what the workflows do between two rules


def _timeout_is_a_release(self: Any, kind: str) -> None:
    name = self.state.step.role
    if self.state.step.method == "offload":
        self._record(name, LeaseEvent.RELEASE_CONFIRMED)
        self._succeeded()
    else:
        _BLOCK(self, kind)


def _failed_onload_is_forgotten(self: Any, kind: str) -> None:
    if self.state.step.method == "onload":
        self._record(self.state.step.role, LeaseEvent.ONLOAD_CONFIRMED)
        self._succeeded()
    else:
        _BLOCK(self, kind)


def _late_success_counts(self: Any, name: str) -> None:
    if name in self.state.book.blocked:
        self._record(name, LeaseEvent.RELEASE_CONFIRMED)
        self._known()


_BLOCK = _Next._block

GLUE: dict[str, Mutate] = {
    "a-timeout-is-a-release": replaced(_Next, "_block", _timeout_is_a_release),
    "a-failed-onload-is-an-onload": replaced(_Next, "_block", _failed_onload_is_forgotten),
    "a-late-success-counts": replaced(_Next, "_late_answer", _late_success_counts),
    "a-person-does-not-look": ignored(_Next, "_end_what_holds"),
    "training-needs-no-commit": replaced(_Next, "_do_commit", lambda self, name: self._go_on()),
    "commit-before-publication": replaced(_Next, "_do_publish", lambda self, name: self._go_on()),
    "commit-before-scores": replaced(_Next, "_do_score", lambda self, name: self._go_on()),
    "a-step-that-gives-up-keeps-its-role": replaced(
        _Next, "_give_up", lambda self: self._step(mode="person")
    ),
}
