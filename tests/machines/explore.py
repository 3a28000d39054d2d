"""Breadth-first search over the model, what must hold in every state, and readable traces."""

import gc
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from relax_infer.machines import (
    BATCH,
    GROUP,
    LEASE,
    RECOVERY,
    REPLICA,
    STEP,
    GroupState,
    IllegalTransition,
    LeaseState,
    Machine,
    ReplicaState,
)
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.hazards import events
from tests.machines.model import Config, Event, Role, State, ended, shown
from tests.machines.moves import after_event
from tests.machines.recoveries import course
from tests.machines.values import HOLDING, Gpu

Check = Callable[[Config, State], object]

PROVING = frozenset(
    {
        *("probe", "held_back_answer", "resolve", "resolve_and_abandon", "unanswered"),
        "resolve_unreachable",
        *("answer", "hear", "again", "request_lost", "reply_lost"),
    }
)
"""Events that may leave BLOCKED: a proof, a person, or the end of what either had begun."""


_PATIENCE = 400
_SHOWN = 12


class Stuck(Violation):
    """No good end: what a helpful environment tries from here."""

    def __init__(self, text: str, tried: list[Event]) -> None:
        super().__init__(text)
        self.tried = tried


class Broken(AssertionError):
    """A promise does not hold; the text has the shortest trace that shows it."""


@dataclass
class Explored:
    """What a search has seen."""

    config: Config
    depth: int = 0
    complete: bool = False
    parents: dict[State, tuple[State, Event] | None] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)

    @property
    def states(self) -> int:
        return len(self.parents)

    def path(self, state: State) -> list[Event]:
        found: list[Event] = []
        while (step := self.parents[state]) is not None:
            state, event = step
            found.append(event)
        return found[::-1]

    def trace(self, state: State, then: Sequence[Event] = ()) -> str:
        """One line per event from the beginning to ``state`` and on, and what came of each."""
        lines, at = [], self.config.initial()
        for event in (*self.path(state), *then):
            try:
                at = after_event(self.config, at, event)
                became = shown(self.config, at)
            except Violation:
                became = "broken here"
            lines.append(f"{' '.join(event):<32} | {became}")
        return "\n".join(f"{n:>3}  {line}" for n, line in enumerate(lines, 1))


def explore(
    config: Config, depth: int = 200, *, live: bool = True, check: Check | None = None
) -> Explored:
    """Every state within ``depth`` events of the beginning; raises :class:`Broken`.

    ``live``: also whether each of them can still come to a good end. ``check`` alone is asked
    of every state; left out, everything that must hold.
    """
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes cycles
    try:
        return _search(config, depth, live, check)
    finally:
        if collecting:
            gc.enable()


def _search(config: Config, depth: int, live: bool, check: Check | None) -> Explored:
    found = Explored(config)
    first = config.initial()
    found.parents[first] = None
    layer, good = [first], set[State]()
    while layer and found.depth < depth:
        found.depth += 1
        following: list[State] = []
        for state in layer:
            event: Event = ()
            try:
                if live:
                    settle(config, state, good)
                for event in events(config, state):
                    after = after_event(config, state, event)
                    if check is None:
                        check_change(config, state, event, after)
                    found.fired[event[0]] += 1
                    if after not in found.parents:
                        (check or check_state)(config, after)
                        found.parents[after] = (state, event)
                        following.append(after)
            except Stuck as stuck:
                raise Broken(f"{stuck}\n{found.trace(state, stuck.tried)}") from stuck
            except (Violation, IllegalTransition) as broken:
                raise Broken(
                    f"{broken}\n{found.trace(state, [event] if event else [])}"
                ) from broken
        layer = following
    found.complete = not layer
    return found


def check_one_holder(config: Config, state: State) -> frozenset[str]:
    """The roles that physically hold: never two."""
    holders = frozenset(
        name for name, role in zip(config.roles, state.roles, strict=True) if role.holding
    )
    if len(holders) > 1:
        raise Violation(f"two physical holders: {' and '.join(sorted(holders))}")
    return holders


def check_state(config: Config, state: State) -> None:
    """What must hold in every state."""
    holders = check_one_holder(config, state)
    leases = [r for r, _ in state.book.leases if state.book.holds(r)]
    if len(leases) > 1 and set(leases) != set(state.anew.left):
        raise Violation(f"the book gave the pool to {', '.join(leases)} at once")
    if state.faults == config.faults and (state.book.blocked or state.step.mode == "giving_up"):
        raise Violation("nothing went wrong, and yet the lease is BLOCKED or the step gives up")
    for name in holders:
        if not state.book.holds(name):
            raise Violation(f"{name} physically holds; the book says that it sleeps")
    for name, role in zip(config.roles, state.roles, strict=True):
        doubted = "memory_not_freed" in config.allow  # what they say is what must not be believed
        for engine in role.engines:
            if name == "trainer":
                continue
            gone = engine.gpu is Gpu.OWED and engine.state is ReplicaState.DEAD
            if engine.gpu in HOLDING and not (REPLICA.holds(engine.state) or doubted or gone):
                raise Violation(f"{name}: its engine holds and calls itself {engine.state}")
            if engine.state not in _ENGINE_RESTS:
                raise Violation(f"{name}: its engine rests in {engine.state}")
            if engine.gate and engine.gpu is not Gpu.FULL:
                raise Violation(f"{name}: an incomplete engine answers")
            if engine.state is ReplicaState.READY and engine.gpu is Gpu.PARTIAL:
                raise Violation(f"{name}: an incomplete engine calls itself READY")
            _left_by_rule(REPLICA, engine.state)
        if name != "trainer":
            if role.holding and not (GROUP.holds(role.group.state) or doubted):
                raise Violation(f"{name} holds and its group is {role.group.state}")
            if role.work is None and role.group.state not in _GROUP_RESTS:
                raise Violation(f"{name}: its group rests in {role.group.state}")
            _left_by_rule(GROUP, role.group.state)
            for _, record in role.group.records:
                _left_by_rule(REPLICA, record)
            for recovery in role.group.recoveries:
                for entered in course(recovery).states:
                    _left_by_rule(RECOVERY, entered)
        _left_by_rule(LEASE, state.book.lease(name).state)
    _left_by_rule(STEP, state.step.phase)
    if state.book.batch is not None:
        _left_by_rule(BATCH, state.book.batch.state)
    if wrong := books.wrongly_granted(state.book, holders):
        raise Violation(wrong)


_ENGINE_RESTS = frozenset(
    {
        *(ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.FAILED, ReplicaState.DEAD),
        ReplicaState.ONLOADING,  # launched by a recovery, and not yet checked
    }
)
_GROUP_RESTS = frozenset(
    {GroupState.READY, GroupState.SLEEPING, GroupState.BLOCKED, GroupState.STOPPED}
)


def check_change(config: Config, before: State, event: Event, after: State) -> None:
    """What must hold between a state and the next."""
    if after.book is not before.book:
        if after.book.counter < before.book.counter:
            raise Violation("the fence counter went back")
        for name in before.book.blocked:
            if name not in after.book.blocked and event[0] not in PROVING:
                raise Violation(f"{name} left BLOCKED on {' '.join(event)}, without a proof")
        for name, role in zip(config.roles, after.roles, strict=True):
            became = after.book.lease(name).state is LeaseState.ACTIVE
            if became and before.book.lease(name).state is not LeaseState.ACTIVE:
                _is_up(name, role, event)
        repeated = [n for n, times in Counter(after.book.committed).items() if times > 1]
        if repeated:
            raise Violation(f"{repeated} committed twice")
    if after.truth.trained and not after.committed:
        raise Violation("trained without a commit")
    for old, new in zip(before.roles, after.roles, strict=True):
        for was, now in zip(old.engines, new.engines, strict=True):
            if was.seen is not None and (now.seen is None or now.seen < was.seen):
                raise Violation("an engine took a lower fence token after a higher one")


_LEFT_BY: dict[str, dict[str, frozenset[str]]] = {
    "Lease": {
        "BLOCKED": frozenset({"ACTIVE_PROVED", "RELEASE_PROVED", "RESOLVED_BY_OPERATOR"}),
        "ACTIVE": frozenset({"DRAIN_STARTED", "OPERATION_FAILED"}),
    },
    "Step phase": {
        "GENERATING": frozenset({"GENERATED", "GAVE_UP"}),
        "PUBLISHING": frozenset({"PUBLISHED", "GAVE_UP"}),
        "FINALIZING": frozenset({"FINALIZED", "GAVE_UP"}),
    },
    "Batch gate": {"COMMITTED": frozenset(), "FAILED": frozenset()},
    "Recovery": {
        "FENCED": frozenset({"STOP_STARTED"}),
        "STOPPING": frozenset({"STOPPED", "PROOF_FAILED"}),
        "BLOCKED": frozenset({"LEFT_RELEASE_PROVED", "RESOLVED_BY_OPERATOR"}),
    },
    "Group": {
        "BLOCKED": frozenset(
            {
                *("SLEEP_PROVED", "READY_PROVED", "RELEASE_PROVED"),
                *("LOST_REPLICA_PROVED_GONE", "STOP_STARTED"),
            }
        ),
        "READY": frozenset(
            {
                *("WEIGHTS_UPDATE_STARTED", "DRAIN_STARTED", "REPLICA_LOST"),
                *("OPERATION_UNCONFIRMED", "STOP_STARTED"),
            }
        ),
        "STOPPED": frozenset({"LAUNCH_STARTED"}),
    },
    "Replica": {
        "FAILED": frozenset(
            {"DRAIN_STARTED", "STOP_STARTED", "RELEASE_PROVED", "RESOLVED_BY_OPERATOR"}
        ),
        "SLEEPING": frozenset({"ONLOAD_STARTED", "DEATH_NOTICED", "STOP_STARTED"}),
        "STARTING": frozenset({"LAUNCHED", "LAUNCH_FAILED", "DEATH_NOTICED", "STOP_STARTED"}),
    },
}
"""What alone may lead out of a state. Anything else would be an answer that came late, a release
that nobody proved or an engine that answers without weights."""


def _is_up(name: str, role: Role, event: Event) -> None:
    if event[0] == "held_back_answer":
        return  # what a slow probe saw may have died since
    for k, engine in enumerate(role.engines):
        if name != "trainer" and dict(role.group.records)[k] is not ReplicaState.READY:
            continue  # it was given up; at least one answers
        if name != "trainer" and engine.holder and engine.gpu in (Gpu.NONE, Gpu.ORPHAN):
            continue  # it died while a sibling was rebuilt: the watch of the group will notice
        if engine.gpu is not Gpu.FULL or (name != "trainer" and not engine.gate):
            raise Violation(f"{name} became ACTIVE and its engine is not up")


def _left_by_rule(machine: Machine, state: StrEnum) -> None:
    allowed = _LEFT_BY[machine.name].get(state)
    if allowed is None:
        return
    if others := [str(event) for event in machine.legal(state) if event not in allowed]:
        raise Violation(f"{machine.name} may leave {state} on {', '.join(others)}")


def settle(config: Config, state: State, good: set[State]) -> None:
    """From ``state`` on without further faults: a committed and trained batch, then the end.

    Calls are answered, a BLOCKED lease is probed and then resolved by a person, a step that gave
    up is repeated. ``good`` are states known to settle; those on the way join them.
    Raises :class:`Stuck` when it comes to nothing.
    """
    way: dict[State, None] = {}
    events_so_far: list[Event] = []
    patient = replace(config, attempts=state.step.attempt + 3)
    quiet = tuple(role._replace(zombies=frozenset()) for role in state.roles)
    state = state._replace(faults=0, roles=quiet)
    while not ended(state) and state not in good:
        try:
            if len(way) > _PATIENCE:
                raise Violation("it goes round and never comes to the end")
            way[state] = None
            event, after = _helpful(patient, state, way)
            events_so_far.append(event)
            if event == ("person", "stop"):
                raise Violation("a repeated step fails again and again though nothing is wrong")
            check_change(config, state, event, after)
            state = after
        except Violation as broken:
            raise Stuck(str(broken), events_so_far[:_SHOWN]) from broken
    good.update(way)


def _helpful(config: Config, state: State, way: Container[State]) -> tuple[Event, State]:
    """The first event of a helpful environment that leads to anything new."""
    possible = events(config, state)
    order = ("answer", "hear", "again", "notice", "told", "held_back_answer", "probe", "resolve")
    for name in (*order, "asks_again", "next", "person"):
        for event in possible:
            if event[0] == name and (after := after_event(config, state, event)) not in way:
                return event, after
    raise Violation("nothing more leads anywhere, and the run has not ended")
