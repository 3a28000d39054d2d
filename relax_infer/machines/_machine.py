"""The one way a state changes: a frozen table and a function that advances.

A :class:`Machine` knows nothing of clocks, I/O or Temporal. Whoever owns a state keeps it in a
variable and replaces it with ``MACHINE.advance(state, event)``; nothing else assigns a state.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class IllegalTransition(Exception):
    """An event that the table does not allow in this state.

    The text names the machine, the state, the event, what would be legal and, for edges that must
    never exist, why.
    """

    def __init__(
        self, machine: str, state: StrEnum, event: StrEnum, legal: Iterable[StrEnum], why: str = ""
    ) -> None:
        self.machine, self.state, self.event = machine, state, event
        allowed = ", ".join(sorted(legal)) or "nothing: the state is final"
        reason = f" {why}" if why else ""
        super().__init__(
            f"{machine}: {event} is not legal in {state}; legal there: {allowed}.{reason}"
        )


@dataclass(frozen=True)
class Machine(Generic[S, E]):
    """A transition table.

    Attributes:
        name: what the machine describes, as in the documentation.
        states: the enum of states; a line of documentation stands under each member.
        events: the enum of events. An event that ends a hold names its proof.
        initial: the state a new record begins in.
        terminal: states that nothing leaves.
        holds_gpu: states in which the record must be taken to hold its GPUs.
        transitions: ``(state, event) -> state``, immutable.
        forbidden: ``(state, event) -> reason`` for edges that look plausible and must not exist.
    """

    name: str
    states: type[S]
    events: type[E]
    initial: S
    transitions: Mapping[tuple[S, E], S]
    terminal: frozenset[S] = frozenset()
    holds_gpu: frozenset[S] = frozenset()
    forbidden: Mapping[tuple[S, E], str] = field(default_factory=dict[tuple[S, E], str])

    def __post_init__(self) -> None:
        for attribute in ("transitions", "forbidden"):
            frozen = MappingProxyType(dict(getattr(self, attribute)))
            object.__setattr__(self, attribute, frozen)
        for state, event in self.transitions:
            if state in self.terminal:
                raise ValueError(f"{self.name}: {state} is terminal but {event} leaves it")
            if (state, event) in self.forbidden:
                raise ValueError(f"{self.name}: {state} on {event} is both an edge and forbidden")

    def legal(self, state: S) -> tuple[E, ...]:
        """The events that may happen in ``state``, in the order of the table."""
        return tuple(event for source, event in self.transitions if source == state)

    def allows(self, state: S, event: E) -> bool:
        return (state, event) in self.transitions

    def advance(self, state: S, event: E) -> S:
        """The state after ``event``; raises :class:`IllegalTransition` when there is no edge."""
        target = self.transitions.get((state, event))
        if target is None:
            raise IllegalTransition(
                self.name, state, event, self.legal(state), self.forbidden.get((state, event), "")
            )
        return target

    def holds(self, state: S) -> bool:
        return state in self.holds_gpu


def edges(*rows: tuple[Iterable[S] | S, E, S]) -> dict[tuple[S, E], S]:
    """A transition mapping from rows ``(state or states, event, target)``; no duplicates."""
    table: dict[tuple[S, E], S] = {}
    for sources, event, target in rows:
        for source in (sources,) if isinstance(sources, StrEnum) else tuple(sources):
            if (source, event) in table:
                raise ValueError(f"{source} on {event} appears twice")
            table[source, event] = target
    return table
