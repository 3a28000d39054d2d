"""Breadth-first search over the model, what must hold in every state, and readable traces."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from relax_infer.machines import GROUP, LEASE, REPLICA, LeaseState, Machine, ReplicaState
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.model import Config, Event, State, ended, shown
from tests.machines.moves import after_event, events
from tests.machines.parts import HOLDING, Gpu

PROVING = frozenset({"probe", "held_back_answer", "resolve", "resolve_and_abandon"})
"""Events that may leave BLOCKED: a proof, or a person."""


class Broken(AssertionError):
    """A promise does not hold; the text has the shortest trace that shows it."""


@dataclass
class Explored:
    """What a search has seen."""

    config: Config
    depth: int = 0
    complete: bool = False
    parents: dict[State, tuple[State, Event] | None] = field(default_factory=dict)
    edges: list[tuple[State, State]] = field(default_factory=list)
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

    def trace(self, state: State, *more: Event) -> str:
        """One line per event from the beginning to ``state``, and what came of each."""
        lines, at = [], self.config.initial()
        for event in self.path(state):
            at = after_event(self.config, at, event)
            lines.append(f"{' '.join(event):<34}| {shown(self.config, at)}")
        lines += [" ".join(event) for event in more]
        return "\n".join(f"{n:>3}  {line}" for n, line in enumerate(lines, 1))


def explore(config: Config, depth: int, *, keep_edges: bool = False) -> Explored:
    """Every state within ``depth`` events of the beginning; raises :class:`Broken`."""
    found = Explored(config)
    first = config.initial()
    found.parents[first] = None
    layer: deque[State] = deque([first])
    while layer and found.depth < depth:
        found.depth += 1
        following: deque[State] = deque()
        for state in layer:
            for event in events(config, state):
                try:
                    after = after_event(config, state, event)
                    check_change(state, event, after)
                    if after not in found.parents:
                        check_state(config, after)
                except Violation as broken:
                    trace = found.trace(state, event)
                    raise Broken(f"{broken}\n{trace}") from broken
                found.fired[event[0]] += 1
                if keep_edges:
                    found.edges.append((state, after))
                if after not in found.parents:
                    found.parents[after] = (state, event)
                    following.append(after)
        layer = following
    found.complete = not layer
    return found


def check_state(config: Config, state: State) -> None:
    """What must hold in every state."""
    holders = frozenset(
        name for name, role in zip(config.roles, state.roles, strict=True) if role.holding
    )
    if len(holders) > 1:
        raise Violation(f"two physical holders: {', '.join(sorted(holders))}")
    if len(leases := [r for r, _ in state.book.leases if state.book.holds(r)]) > 1:
        raise Violation(f"the book gave the pool to {', '.join(leases)} at once")
    for name in holders:
        if not state.book.holds(name):
            raise Violation(f"{name} physically holds; the book says that it sleeps")
    for name, role in zip(config.roles, state.roles, strict=True):
        for engine in role.engines:
            if name == "trainer":
                continue
            if engine.gpu in HOLDING and not REPLICA.holds(engine.state):
                raise Violation(f"{name}: its engine holds and calls itself {engine.state}")
            if engine.gate and engine.gpu is not Gpu.FULL:
                raise Violation(f"{name}: an incomplete engine answers")
            if engine.state is ReplicaState.READY and engine.gpu is Gpu.PARTIAL:
                raise Violation(f"{name}: an incomplete engine calls itself READY")
            _refuses(REPLICA, engine.state, _REPLICA_REFUSES)
        if name != "trainer":
            if role.holding and not GROUP.holds(role.group.state):
                raise Violation(f"{name} holds and its group is {role.group.state}")
            _refuses(GROUP, role.group.state, _GROUP_REFUSES)
            for _, record in role.group.records:
                _refuses(REPLICA, record, _REPLICA_REFUSES)
        _refuses(LEASE, state.book.lease(name).state, _LEASE_REFUSES)
    if wrong := books.wrongly_granted(state.book, holders):
        raise Violation(wrong)


def check_change(before: State, event: Event, after: State) -> None:
    """What must hold between a state and the next."""
    if after.book is not before.book:
        if after.book.counter < before.book.counter:
            raise Violation("the fence counter went back")
        for name in before.book.blocked:
            if name not in after.book.blocked and event[0] not in PROVING:
                raise Violation(f"{name} left BLOCKED on {' '.join(event)}, without a proof")
        repeated = [n for n, times in Counter(after.book.committed).items() if times > 1]
        if repeated:
            raise Violation(f"{repeated} committed twice")
    if after.truth.trained and not after.book.committed:
        raise Violation("trained without a commit")
    for old, new in zip(before.roles, after.roles, strict=True):
        for was, now in zip(old.engines, new.engines, strict=True):
            if was.seen is not None and (now.seen is None or now.seen < was.seen):
                raise Violation("an engine took a lower fence token after a higher one")


def _refuses(machine: Machine, state: object, table: dict[object, frozenset[str]]) -> None:
    """States that must be left only by what the table names."""
    allowed = table.get(state)
    if allowed is None:
        return
    others = [str(e) for e in machine.legal(state) if str(e) not in allowed]  # type: ignore[arg-type]
    if others:
        raise Violation(f"{machine.name} may leave {state} on {', '.join(others)}")


_LEASE_REFUSES: dict[object, frozenset[str]] = {
    LeaseState.BLOCKED: frozenset({"ACTIVE_PROVED", "RELEASE_PROVED", "RESOLVED_BY_OPERATOR"}),
}
_GROUP_REFUSES: dict[object, frozenset[str]] = {}
_REPLICA_REFUSES: dict[object, frozenset[str]] = {}


def ways_to(found: Explored, goal: Callable[[State], bool]) -> list[State]:
    """The states of a complete search from which no path leads to ``goal``."""
    into: dict[State, list[State]] = {}
    for before, after in found.edges:
        into.setdefault(after, []).append(before)
    good = {state for state in found.parents if goal(state)}
    waiting = deque(good)
    while waiting:
        for before in into.get(waiting.popleft(), ()):
            if before not in good:
                good.add(before)
                waiting.append(before)
    return [state for state in found.parents if state not in good]


_ = ended
