"""Ways to break the rules, one at a time, and what catches a break.

A mutant changes the project's own code or tables in place. It is caught when a promise is broken
or when a state can no longer come to a good end; searches of growing size are tried in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

import relax_infer.engines.actor as actor_module
import workflows._group_proving as proving_module
import workflows._lease_book as book_module
import workflows._lease_proving as lease_proving_module
from relax_infer.contracts.failures import UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.engines import closed_grants
from relax_infer.engines.replica import EngineReplica
from relax_infer.engines.resident import Resident
from relax_infer.machines import (
    ALL,
    BATCH,
    GROUP,
    LEASE,
    RECOVERY,
    REPLICA,
    STEP,
    GroupEvent,
    GroupState,
    LeaseEvent,
    Machine,
)
from relax_infer.machines import ReplicaState as R
from relax_infer.training.policy import PolicyTrainer
from relax_infer.training.trainer import TrainerActor
from tests.machines import host, trainer, values
from tests.machines.explore import Broken, explore
from tests.machines.model import Config
from tests.machines.moves import _Next
from tests.machines.values import Answer
from workflows._group_book import GroupBook
from workflows._lease_book import LeaseBook
from workflows.engine_lifecycle import EngineLifecycle
from workflows.replica_recovery import ReplicaRecovery

Edge = tuple[StrEnum, StrEnum]
Mutate = Callable[[pytest.MonkeyPatch], None]

MACHINES: tuple[Machine[Any, Any], ...] = (LEASE, BATCH, REPLICA, GROUP, RECOVERY, STEP)
_TWO = ("rollout", "trainer")
_THREE = ("rollout", "genrm", "trainer")
TAUGHT = Config(roles=("rollout", "teacher", "trainer"), faults=1)
JUDGED_AND_TAUGHT = Config(roles=("rollout", "genrm", "teacher", "trainer"), faults=1)
LOST_LEASE = Config(roles=_TWO, faults=1, allow=frozenset({"lease_lost"}))
SHALLOW = (
    Config(roles=_TWO, faults=1),
    Config(roles=_THREE, faults=1),
    Config(roles=_TWO, faults=1, replicas=2),
    Config(roles=_TWO, faults=1, allow=frozenset({"acknowledge_releases"})),
    Config(roles=_THREE, faults=1, allow=frozenset({"memory_not_freed"})),
    LOST_LEASE,
)
DEEP = (
    Config(roles=_TWO, faults=2, only=frozenset({"answer"})),
    Config(
        roles=_TWO,
        faults=2,
        only=frozenset({"answer", "server_dies"}),
        without=frozenset({"again"}),
    ),
    Config(roles=_TWO, faults=2),
    Config(roles=_TWO, faults=2, replicas=2, only=frozenset({"request_lost", "late"})),
)
"""From small to large; a mutant that survives all of both survives."""


def _three(*only: str, replicas: int = 1) -> Config:
    return Config(roles=_TWO, faults=3, replicas=replicas, only=frozenset(only))


def _lost(other: str) -> Config:
    """A lost lease, and a fault of one other kind."""
    return replace(LOST_LEASE, faults=2, only=frozenset({"lease_lost", other}))


ONE_WAY = {
    "without Step phase ROLLOUT_OFFLOADING on TEACHING_STARTED": TAUGHT,
    "without Step phase TEACHER_SCORING on SCORES_IN": TAUGHT,
    "without Step phase TEACHER_SCORING on GAVE_UP": TAUGHT,
    "without Step phase GENRM_SCORING on TEACHING_STARTED": JUDGED_AND_TAUGHT,
    "a-group-goes-to-sleep-with-its-token": _three("answer", "late"),
    "what-was-given-up-is-not-asked-to-let-go": _three("answer", "late", replicas=2),
    "an-engine-does-not-ask-whether-its-grant-is-closed": _three("request_lost", "answer", "late"),
    "a-dead-replica-that-is-rebuilt-is-no-doubt": _three("server_dies", "answer", "request_lost"),
    "without Replica STARTING on STOP_STARTED": _three("server_dies", "answer", "request_lost"),
    "without Lease SLEEPING on MEMORY_LOST": LOST_LEASE,
    "a-new-lease-takes-all-for-asleep": LOST_LEASE,
    "a-new-lease-counts-from-nothing": LOST_LEASE,
    "what-a-lost-lease-left-is-up-for-nobody": _lost("answer"),
    "what-a-lost-lease-left-is-free-anyhow": _lost("answer"),
    "what-a-lost-lease-left-is-only-looked-at": LOST_LEASE,
    "a-lease-begins-anew-while-roles-are-gone": LOST_LEASE,
    "a-word-ends-one-grant-alone": _lost("late"),
    "what-is-gone-lets-go-before-its-memory-is-back": Config(
        roles=_TWO,
        allow=frozenset({"memory_owed"}),
        only=frozenset({"answer", "server_dies"}),
    ),
    "a-person-s-word-does-not-reach-a-stop": Config(
        roles=_TWO, only=frozenset({"answer"}), without=frozenset({"again"})
    ),
}
"""For mutants that only these searches can catch."""


@contextmanager
def fresh() -> Iterator[pytest.MonkeyPatch]:
    """Rules that may be changed and are as before afterwards."""
    tables = [(machine, machine.transitions) for machine in ALL]
    with pytest.MonkeyPatch.context() as patch:
        values.forget()
        try:
            yield patch
        finally:
            for machine, table in tables:
                _set_transitions(machine, dict(table))
            values.forget()


def what_catches(mutate: Mutate, searches: Sequence[Config]) -> str | None:
    """The first line of the counterexample; None: the mutant survives."""
    with fresh() as patch:
        mutate(patch)
        for config in searches:
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


def leading_to(machine: Machine[Any, Any], edge: Edge, state: StrEnum) -> Mutate:
    """The table with one transition that leads elsewhere."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        _set_transitions(machine, {**machine.transitions, edge: state})

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


def _asleep_unless_committing(self: LeaseBook, what: str, beside: str) -> None:
    if "commit" not in what:
        _NEED_ASLEEP(self, what, beside)


_NEED_ASLEEP = LeaseBook._need_asleep


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


def _up_for_nobody(state: str, *, left: bool) -> LeaseEvent | None:
    return _PROVES(state, left=False)


_PROVES = lease_proving_module.what_it_proves

LEASE_GUARDS: dict[str, Mutate] = {
    "grant-while-another-holds": _grant_unchecked,
    "commit-while-a-role-holds": replaced(LeaseBook, "_need_asleep", _asleep_unless_committing),
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
    "a-new-lease-takes-all-for-asleep": ignored(LeaseBook, "doubt"),
    "a-new-lease-counts-from-nothing": replaced(book_module, "NUMBERS_PER_LEASE", 0),
    "what-a-lost-lease-left-is-up-for-nobody": replaced(
        lease_proving_module, "what_it_proves", _up_for_nobody
    ),
}


# --- engines and groups


def _admit_lower(self: FenceMemory, token: FenceToken, *, loads: bool = False) -> None:
    self.seen, self.ended = token, self.ended and token == self.seen


def _admit_ended(self: FenceMemory, token: FenceToken, *, loads: bool = False) -> None:
    _ADMIT(self, token)


_ADMIT = FenceMemory.admit


def _write_fence_without_end(self: Any, memory: FenceMemory) -> None:
    self.kept = FenceMemory(memory.seen)


async def _end_without_proof(self: Any, *_: object) -> None:
    self.gate = False
    holding = self.trouble == "prove" and self.gpu in values.HOLDING
    self.gpu, self.kind = (values.Gpu.ORPHAN if holding else values.Gpu.NONE), ""


async def _partial_is_ready(self: Any, control: Any, tags: Any, token: Any, _: float) -> None:
    missing = [tag for tag in tags if tag not in self.tags]
    if missing:
        try:
            await control.resume(missing, token, 1.0)
        except UnconfirmedError:
            control.gpu = values.Gpu.PARTIAL
        self.tags.update(missing)


def _proved_without_token(seen: Any, fence: Any) -> GroupEvent | None:
    return _PROVED([r.model_copy(update={"fence": fence}) for r in seen], fence)


def _proved_by_one(seen: Any, fence: Any) -> GroupEvent | None:
    proofs = [_PROVED([report], fence) for report in seen]
    return next((proof for proof in proofs if proof is not None), None)


_PROVED = proving_module._proved


def _failed_counts_as_gone(seen: Any, fence: Any) -> GroupEvent | None:
    return GroupEvent.RELEASE_PROVED if {r.state for r in seen} <= {R.DEAD, R.FAILED} else None


async def _trusts_a_failed_engine(self: Any, op: Any) -> Any:
    self.nodes._head.files.kind = ""
    return self._evidence(op.fence, gone=True)


async def _asks_no_driver(self: Any, op: Any, uses: Any = ()) -> Any:
    return self._evidence(op.fence, uses, gone=True)


def _one_speaks_for_all(self: GroupBook, report: Any) -> None:
    up = any(r.state is R.READY for r in report.replicas)
    told = [r.model_copy(update={"state": R.READY}) if up else r for r in report.replicas]
    _SETTLE_ONLOAD(self, report.model_copy(update={"replicas": tuple(told)}))


_SETTLE_ONLOAD = GroupBook.settle_onload


def _stop_begins_once(self: GroupBook) -> None:
    self.move(GroupEvent.STOP_STARTED)
    self._each(REPLICA.events.STOP_STARTED, list(self.replicas))


def _doubt_says_asleep(self: Any) -> Any:
    return self._result().model_copy(update={"state": GroupState.SLEEPING})


def _carry_without_end(self: GroupBook) -> dict[str, Any]:
    return {**_CARRY(self), "fence_ended": False}


_CARRY = GroupBook.carry


async def _nobody_heals(self: Any, replicas: Any, cause: str, *, rebuild: bool) -> tuple[Any, ...]:
    for replica in replicas:
        self._book.replicas[replica] = self._book.replicas[replica].model_copy(
            update={"state": R.DEAD}
        )
    return ()


async def _stopped_at_once(self: Any) -> bool:
    if self._state is RECOVERY.states.STOPPING:
        await self._move(RECOVERY.events.STOPPED)
    return True


async def _blocked_goes_on(self: Any) -> bool:
    await self._move(RECOVERY.events.STOP_STARTED)
    await self._move(RECOVERY.events.STOPPED)
    await self._stopped()
    return True


async def _asleep_though_awake(self: Any) -> None:
    self._book.in_use = False
    if not self._book.failed:
        self._book.move(GroupEvent.SLEEP_PROVED)


def _holds_once_resident(self: Any) -> None:
    if not self.resident:
        self._learner.to_device()
        self.resident = self.holds = True


def _follows_no_dead(self: GroupBook, replica: int, state: Any) -> None:
    if self.replicas[replica].state is not R.DEAD or state is not RECOVERY.states.STOPPING:
        _FOLLOW(self, replica, state)


_FOLLOW = GroupBook.follow


async def _sleeps_with_its_token(self: EngineLifecycle) -> None:
    self._book.in_use = False
    if self._book.holding:
        await _PUT_TO_SLEEP(self)
    elif not self._book.failed:
        self._book.move(GroupEvent.SLEEP_PROVED)


_PUT_TO_SLEEP = EngineLifecycle._put_to_sleep


async def _believes_in_sleep(self: EngineLifecycle, operation: Any, *_: Any) -> Any:
    if self._book.state is GroupState.BLOCKED:
        self._book.move(GroupEvent.SLEEP_PROVED)
    self._book.fence.end()
    return self._result()


async def _lets_go_and_keeps_its_token(self: TrainerActor, op: Any) -> Any:
    report = await self._offload(op)
    self._fence.ended = False
    self._files.write_fence(self._fence)
    return report


def _one_alone(names: Any, token: FenceToken) -> bool:
    return closed_grants.name_of(token) in names


ENGINE_GUARDS: dict[str, Mutate] = {
    "engine-takes-a-lower-token": replaced(FenceMemory, "admit", _admit_lower),
    "engine-loads-under-an-ended-token": replaced(FenceMemory, "admit", _admit_ended),
    "tokens-never-end": ignored(FenceMemory, "end"),
    "tokens-do-not-end-at-the-engines": replaced(actor_module, "_RELEASES", ()),
    "engine-forgets-its-token-with-its-actor": ignored(host._Host, "write_fence"),
    "engine-forgets-the-end-of-its-token": replaced(
        host._Host, "write_fence", _write_fence_without_end
    ),
    "actor-does-not-look-for-what-was-left": ignored(host._Host, "holder"),
    "killed-without-proof": replaced(host._Host, "end", _end_without_proof),
    "failed-engine-is-taken-at-its-word": replaced(EngineReplica, "_gone", _trusts_a_failed_engine),
    "what-is-gone-lets-go-before-its-memory-is-back": replaced(
        EngineReplica, "_free", _asks_no_driver
    ),
    "partial-onload-is-ready": replaced(Resident, "resume", _partial_is_ready),
    "failed-onload-changes-no-state": ignored(EngineReplica, "_fail"),
    "death-is-not-noticed": replaced(EngineReplica, "_notice_death", _nothing),
    "failed-does-not-hold": holds_too_little(REPLICA, R.FAILED),
    "blocked-group-does-not-hold": holds_too_little(GROUP, GROUP.states.BLOCKED),
    "one-replica-speaks-for-all": replaced(GroupBook, "settle_onload", _one_speaks_for_all),
    "probe-under-any-token": replaced(proving_module, "_proved", _proved_without_token),
    "probe-of-one-proves-all": replaced(proving_module, "_proved", _proved_by_one),
    "probe-takes-failed-for-gone": replaced(proving_module, "_proved", _failed_counts_as_gone),
    "a-doubt-counts-as-sleep": replaced(EngineLifecycle, "_doubted", _doubt_says_asleep),
    "resolve-does-nothing": replaced(EngineLifecycle, "_take_word", _nothing),
    "lifecycle-takes-a-lower-token": ignored(EngineLifecycle, "_admit"),
    "a-stop-cannot-be-repeated": replaced(GroupBook, "begin_stop", _stop_begins_once),
    "restart-forgets-the-end-of-a-token": replaced(GroupBook, "carry", _carry_without_end),
    "what-failed-counts-as-gone": replaced(EngineLifecycle, "_heal", _nobody_heals),
    "a-failed-onload-leaves-its-siblings-awake": replaced(
        EngineLifecycle, "_put_to_sleep", _asleep_though_awake
    ),
    "recovery-does-not-stop": replaced(ReplicaRecovery, "_stopped", _stopped_at_once),
    "recovery-does-not-wait-for-proof": replaced(ReplicaRecovery, "_prove_gone", _blocked_goes_on),
    "recoveries-are-not-followed": ignored(GroupBook, "follow"),
    "losses-are-not-mended": replaced(EngineLifecycle, "_mend", _nothing),
    "trainer-orphan-is-not-doubted": ignored(TrainerActor, "_doubt"),
    "trainer-orphan-is-not-looked-for": ignored(trainer._Device, "check_gone"),
    "an-engine-does-not-ask-whether-its-grant-is-closed": ignored(host._Host, "check"),
    "a-dead-replica-that-is-rebuilt-is-no-doubt": replaced(GroupBook, "follow", _follows_no_dead),
    "a-group-goes-to-sleep-with-its-token": replaced(
        EngineLifecycle, "_put_to_sleep", _sleeps_with_its_token
    ),
    "a-sleep-is-believed": replaced(EngineLifecycle, "_prove_sleep", _believes_in_sleep),
    "what-was-given-up-is-not-asked-to-let-go": replaced(GroupBook, "askable", GroupBook.usable),
    "a-probe-leaves-the-trainer-its-token": replaced(
        TrainerActor, "_settle", _lets_go_and_keeps_its_token
    ),
    "a-word-leaves-the-trainer-its-token": replaced(
        TrainerActor, "_forget", _lets_go_and_keeps_its_token
    ),
    "the-trainer-does-not-ask-whether-its-grant-is-closed": ignored(trainer._Device, "check"),
    "a-word-ends-one-grant-alone": replaced(closed_grants, "ends", _one_alone),
    "trainer-forgets-a-partial-load": replaced(PolicyTrainer, "onload", _holds_once_resident),
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


def _any_grant(self: Any, name: str, what: str, token: Any) -> None:
    """Neither state nor token is compared after the await."""
    if what in ("SLEEPING", "STOPPED"):
        self._record(name, LeaseEvent.RELEASE_PROVED)
    elif what == "READY":
        self._record(name, LeaseEvent.ACTIVE_PROVED)
    self._known()


def _resolved_anyhow(self: Any, name: str, token: Any, answer: Any) -> None:
    self.state = self.state._replace(resolving=())
    self._record(name, LeaseEvent.RESOLVED_BY_OPERATOR)
    self._known()


def _noted_anyhow(self: Any) -> None:
    step = self.state.step
    if step.mode == "run" and self.config.plan[step.pc][0] == "acknowledge":
        self._book("note_rollout_released")
    _SUCCEEDED(self)


def _stop_without_word(self: Any, name: str) -> None:
    self._step(tries=0)
    _DO_STOP(self, name)


def _free_anyhow(self: Any, name: str, work: Any, answer: Any) -> None:
    _HEARD_LETTING_GO(self, name, work, Answer(True, state="SLEEPING"))


def _only_looked_at(self: Any, name: str) -> None:
    self._look_at(name)


def _anew_at_any_time(self: Any) -> None:
    step, anew = self.state.step, self.state.anew
    asks = self.config.action(step)[0] == "deactivate"
    begins = step.pc == 0 and not step.tries
    if anew.gone and (asks or begins):
        self._begin_anew()
        if begins:
            self._step(pc=-len(self.config.roles))


_HEARD_LETTING_GO = _Next._heard_letting_go
_DO_STOP = _Next._do_stop
_BLOCK, _SUCCEEDED = _Next._block, _Next._succeeded

GLUE: dict[str, Mutate] = {
    "a-timeout-is-a-release": replaced(_Next, "_block", _timeout_is_a_release),
    "a-failed-onload-is-an-onload": replaced(_Next, "_block", _failed_onload_is_forgotten),
    "a-late-success-counts": replaced(_Next, "_late_answer", _late_success_counts),
    "a-person-does-not-look": ignored(_Next, "_end_what_holds"),
    "a-probe-of-any-grant-counts": replaced(_Next, "_heard_probe", _any_grant),
    "a-resolution-is-not-looked-at-again": replaced(_Next, "_heard_resolution", _resolved_anyhow),
    "an-abandoned-batch-is-acknowledged": replaced(_Next, "_succeeded", _noted_anyhow),
    "evidence-is-not-read": replaced(_Next, "_doubts", lambda self, name: False),
    "nobody-tells-the-lease-of-a-lost-holder": replaced(_Next, "on_told", lambda self, name: None),
    "a-person-s-word-does-not-reach-a-stop": replaced(_Next, "_do_stop", _stop_without_word),
    "training-needs-no-commit": replaced(_Next, "_do_commit", lambda self, name: self._go_on()),
    "commit-before-publication": replaced(_Next, "_do_publish", lambda self, name: self._go_on()),
    "commit-before-scores": replaced(_Next, "_do_score", lambda self, name: self._go_on()),
    "what-a-lost-lease-left-is-free-anyhow": replaced(_Next, "_heard_letting_go", _free_anyhow),
    "what-a-lost-lease-left-is-only-looked-at": replaced(_Next, "on_probe", _only_looked_at),
    "a-lease-begins-anew-while-roles-are-gone": replaced(_Next, "_need_a_lease", _anew_at_any_time),
    "a-step-that-gives-up-keeps-its-role": replaced(
        _Next, "_give_up", lambda self: self._step(mode="person")
    ),
}
