"""A working copy of a state, and the few ways to change one."""

from collections.abc import Callable

from relax_infer.machines import LeaseEvent
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.model import (
    Config,
    Role,
    State,
    Zombie,
)
from tests.machines.values import Call, Engine

LASTING = frozenset({"onload", "launch", "offload", "stop"})
"""Requests that may come once more, or late."""


class WorkingCopy:
    """A state that is being replaced, piece by piece."""

    def __init__(self, config: Config, state: State) -> None:
        self.config, self.state, self.state_before = config, state, state

    def _book(self, what: str, *args: object) -> None:
        try:
            self.state = self.state._replace(book=books.after(self.state.book, what, *args))
        except AssertionError as error:
            raise Violation(f"{what} fails an assertion; the lease workflow is stuck") from error

    def _record(self, name: str, event: LeaseEvent) -> None:
        self._book("record", name, event)

    def _step(self, **changes: object) -> None:
        self.state = self.state._replace(step=self.state.step._replace(**changes))

    def _truth(self, **changes: object) -> None:
        self.state = self.state._replace(truth=self.state.truth._replace(**changes))

    def _cost(self, spent: bool = True) -> None:
        self.state = self.state._replace(faults=self.state.faults - spent)
        if not self.state.faults:  # what is still on its way never arrives: forget it
            roles = tuple(r._replace(zombies=frozenset()) for r in self.state.roles)
            self.state = self.state._replace(roles=roles)

    def _hold_back(self, *answer: str) -> None:
        self.state = self.state._replace(held_back=(answer,))

    def _role(self, name: str) -> Role:
        return self.state.roles[self.config.roles.index(name)]

    def _call(self, name: str, n: str) -> Call:
        return self._role(name).calls[int(n)]

    def _set_role(self, name: str, role: Role) -> None:
        at = self.config.roles.index(name)
        roles = (*self.state.roles[:at], role, *self.state.roles[at + 1 :])
        self.state = self.state._replace(roles=roles)

    def _add_zombies(self, name: str, call: Call, *, done: bool) -> None:
        if call.kind not in LASTING or not self.state.faults:
            return
        role = self._role(name)
        new = {Zombie(call.kind, call.token, k, call.ends, done) for k in call.replicas}
        if not done:  # a retry under the same id; either way it may come once
            new |= role.zombies
        else:
            new |= {z for z in role.zombies if z._replace(done=True) not in new}
        self._set_role(name, role._replace(zombies=frozenset(new)))

    def _each_engine(self, name: str, at: int, change: Callable[[Engine], Engine]) -> None:
        role = self._role(name)
        engines = tuple(change(e) if k == at else e for k, e in enumerate(role.engines))
        self._set_role(name, role._replace(engines=engines))
