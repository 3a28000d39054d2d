"""A working copy of a state, and the few ways to change one."""

from collections.abc import Callable

from relax_infer.machines import LeaseEvent
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.model import (
    Call,
    Config,
    Role,
    State,
    Zombie,
)
from tests.machines.values import Engine


class WorkingCopy:
    """A state that is being replaced, piece by piece."""

    def __init__(self, config: Config, state: State) -> None:
        self.config, self.state = config, state

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

    def _hold_back(self, *answer: str) -> None:
        self.state = self.state._replace(held_back=(answer,))

    def _role(self, name: str) -> Role:
        return self.state.roles[self.config.roles.index(name)]

    def _call(self, name: str) -> Call:
        call = self._role(name).call
        assert call is not None
        return call

    def _set_role(self, name: str, role: Role) -> None:
        at = self.config.roles.index(name)
        roles = (*self.state.roles[:at], role, *self.state.roles[at + 1 :])
        self.state = self.state._replace(roles=roles)

    def _add_zombie(self, name: str, zombie: Zombie) -> None:
        role = self._role(name)
        self._set_role(name, role._replace(zombies=role.zombies | {zombie}))

    def _each_engine(self, name: str, at: int, change: Callable[[Engine], Engine]) -> None:
        role = self._role(name)
        engines = tuple(change(e) if k == at else e for k, e in enumerate(role.engines))
        self._set_role(name, role._replace(engines=engines))
