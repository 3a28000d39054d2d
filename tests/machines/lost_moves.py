"""What comes of a lease whose workflow is ended by hand, and of the one that is begun after it.

:class:`LostMoves` mirrors what ``LeaseClient``, ``LeaseProving`` and ``Premises`` do about it. What
the lost lease had asked for goes on; its answers go to nobody.
"""

from tests.machines import books
from tests.machines.groups import Work
from tests.machines.lease_moves import QUICK, SLOW, UNHEARD, LeaseMoves
from tests.machines.model import Role
from tests.machines.values import Answer, Token

Ask = tuple[str, Token | None, int]


class LostMoves(LeaseMoves):
    """A working copy of a state, with what is lost and begun anew."""

    def on_lease_lost(self, reached: str = "") -> None:
        """Its workflow is ended. ``reached``: what it had asked of the trainer was carried out
        first; else it is still on its way."""
        self._cost()
        for name in self.config.roles:
            if name == "trainer":
                self._drop_the_trainer_s(bool(reached))
            else:
                self._set_role(name, _unheard(self._role(name)))
        anew = self.state.anew._replace(gone=True, finding=())
        self.state = self.state._replace(anew=anew, held_back=(), resolving=())
        if self.state.step.wait and self.state.step.method != "stop":
            self._step(wait="gone")

    def _drop_the_trainer_s(self, reached: bool) -> None:
        """It has no workflow of its own: the lease asked it."""
        call = self._role("trainer").own
        if call is not None and reached:
            self._execute("trainer", call, "", "")
        elif call is not None:
            self._add_zombies("trainer", call, done=False)
        self._set_role("trainer", self._role("trainer")._replace(work=None, own=None, inbox=()))

    def on_asks_again(self) -> None:
        """Who waits for its answer sends the same once more."""
        self._step(wait="")
        self.on_next()

    def on_next(self) -> None:
        raise NotImplementedError

    def on_word_anew(self) -> None:
        """A person's word for what the lost lease was in doubt of finds nobody."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Mirrors ``RunCore._begin_lease_anew``, and the lease's own beginning."""
        number = self.state.anew.number + 1
        anew = self.state.anew._replace(
            number=number, gone=False, left=self.config.roles, past=self.state.committed
        )
        self.state = self.state._replace(
            anew=anew, book=books.begun_anew(self.config.roles, number)
        )
        for name in self.config.roles:
            self._set_role(name, self._role(name)._replace(doubted=False))

    # --- what was left

    def _have_let_go(self, name: str, nth: int) -> None:
        """Mirrors the first half of ``LeaseProving._look``."""
        anew = self.state.anew
        if name in anew.finding:
            return
        finding = tuple(sorted((*anew.finding, name)))
        self.state = self.state._replace(anew=anew._replace(finding=finding))
        self._ask(name, "offload", self.state.book.lease(name).token, nth)

    def _heard_letting_go(self, name: str, work: Work, answer: Answer) -> None:
        """And the second."""
        self._found(name)
        if not answer.ok:
            return self._look_slowly_at(name) if work.nth == SLOW else self._look_at(name)
        assert work.asked is not None
        if work.nth == QUICK:
            return self._heard_probe(name, "SLEEPING", work.asked)
        return self._hold_back(name, "SLEEPING", str(work.asked.counter), work.asked.grant_id)

    def on_unanswered(self, name: str) -> None:
        """It did not let go in time; what it was asked goes on."""
        self._cost()
        self._found(name)
        self._set_role(name, _unheard(self._role(name)))
        self._look_at(name)

    def _found(self, name: str) -> None:
        anew = self.state.anew
        finding = tuple(role for role in anew.finding if role != name)
        self.state = self.state._replace(anew=anew._replace(finding=finding))

    # --- the end of a run

    def _need_a_lease(self) -> None:
        """Mirrors ``Premises._let_go``: every role lets go before the first is stopped, while all
        can be asked; from then on nobody needs a lease."""
        step, anew = self.state.step, self.state.anew
        if step.pc > 0 or step.tries:
            if anew.gone and self.config.action(step)[0] == "deactivate":
                self._step(pc=step.pc + 1)
            return
        if anew.gone:
            self._begin_anew()
        if anew.gone or (step.pc == 0 and self.state.book.blocked):
            self._step(pc=-len(self.config.roles))


def _unheard(role: Role) -> Role:
    """What a lease asked of it goes on; nobody hears what comes of it. A run's stop is heard."""
    inbox = tuple((m, token, UNHEARD if token else nth) for m, token, nth in role.inbox)
    work = role.work
    if work is not None and work.asked is not None:
        work = work._replace(nth=UNHEARD)
    return role._replace(inbox=inbox, work=work)
