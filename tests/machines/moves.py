"""What an event makes of a state: :func:`after_event`, and the decisions of step and run.

:class:`_Next` mirrors ``TrainingStep`` and ``TrainingRun`` between two rules.
"""

from relax_infer.machines import (
    STEP,
    BatchState,
    GroupState,
    IllegalTransition,
    ReplicaState,
    StepEvent,
)
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.groups import Work
from tests.machines.host import look
from tests.machines.lease_moves import PERSON
from tests.machines.lost_moves import LostMoves
from tests.machines.model import (
    Config,
    Event,
    State,
    Truth,
    batch_of,
)
from tests.machines.trainer import end_trainer, trainer_train
from tests.machines.values import Gpu
from workflows._lease_book import LeaseRefused


def after_event(config: Config, state: State, event: Event) -> State:
    """The state after ``event``; raises :class:`Violation` where a promise is broken on the way."""
    work = _Next(config, state)
    try:
        getattr(work, f"on_{event[0]}")(*event[1:])
    except IllegalTransition as error:
        raise Violation(f"IllegalTransition in a legal schedule: {error}") from error
    except LeaseRefused as error:
        raise Violation(f"the lease refused what it had begun: {error}") from error
    return work.state


class _Next(LostMoves):
    """A working copy of a state, with what the step and the run do."""

    # --- the step

    def on_next(self) -> None:
        """The step does what comes next."""
        step = self.state.step
        if step.mode == "giving_up":
            return self._give_up()
        if step.mode == "down":
            self._need_a_lease()
        method, name = self.config.action(self.state.step)
        if self.state.anew.gone and method in _OF_LEASE:
            return self._failed()
        if method in ("begin_batch", "activate", "acquire"):
            method, fields = self._request()
            return self._take(method, name, **fields)
        if method in ("deactivate", "release"):
            self._step(role=name, method="offload", tries=0, error="")
            if name in self.state.book.blocked:  # a workflow waits where a person is refused
                return self._step(wait="known")
            if books.refusal(self.state.book, method, role=name) is not None:
                return self._failed()
            return self._release()
        return getattr(self, f"_do_{method}")(name)

    def on_phase_fails(self) -> None:
        """The work of a phase fails for good."""
        self._cost()
        self._failed()

    def on_person(self, decision: str) -> None:
        """A person, told that the step gave up, abandons the batch: again, or the end."""
        asked = {**PERSON, "confirm_released": True, "abandon": True}
        if self.state.anew.gone:
            if decision == "retry":
                self._begin_anew()
        elif books.refusal(self.state.book, "resolve", **asked) is not None:
            raise Violation("a person cannot abandon the batch of a step that gave up")
        else:
            self._book("abandon_batch")
        self._try_again("run" if decision == "retry" else "down")

    def _try_again(self, mode: str) -> None:
        attempt = self.state.step.attempt + (mode == "run")
        self.state = self.state._replace(truth=Truth(), step=type(self.state.step)(mode=mode))
        self._step(attempt=attempt, leases=self.state.anew.number)

    def _do_generate(self, name: str) -> None:
        if self._works(name):
            self._truth(generated=True)
            self._go_on()

    def _do_score(self, name: str) -> None:
        if self._works(name):
            self._truth(scored=(*self.state.truth.scored, name))
            self._go_on()

    def _works(self, name: str) -> bool:
        """Whether the role answers; mirrors ``_run_phase`` and ``_until_ready``.

        Where some engine does not, the step asks the role: it mends at once, is still at it, or has
        nothing left that answers; only then the step gives up.
        """
        role = self._role(name)
        for engine in role.engines:
            if engine.gate and engine.gpu is not Gpu.FULL:
                raise Violation(f"{name}: an incomplete engine answers")
        ready = [k for k, state in role.group.records if state is ReplicaState.READY]
        if role.group.state is GroupState.READY and all(role.engines[k].gate for k in ready):
            return True
        if role.work is None and role.group.state is GroupState.READY:
            seen = tuple(look(engine) for engine in role.engines)
            self._begin(name, Work("ready", None, role.group, results=(seen,)))
        elif role.work is None and role.group.state is not GroupState.BLOCKED:
            self._failed()
        return False

    def _do_acknowledge(self, name: str) -> None:
        batch = batch_of(self.state.step)
        self._step(role=name, method="offload", tries=0, error="")
        if name in self.state.book.blocked:
            return self._step(wait="known")
        if books.refusal(self.state.book, "acknowledge_rollout_offloaded", batch=batch):
            return self._failed()
        return self._release()

    def _do_publish(self, name: str) -> None:
        self._truth(published=True)
        self._go_on()

    def _do_commit(self, name: str) -> None:
        batch, book, truth = batch_of(self.state.step), self.state.book, self.state.truth
        if books.refusal(book, "commit_batch", batch=batch) is not None:
            return self._failed()
        if not truth.generated or truth.scored != self.config.judges or not truth.published:
            raise Violation(f"{batch} is committed before its scores and publication")
        if not book.asleep or any(role.holding for role in self.state.roles):
            raise Violation(f"{batch} is committed while a role holds")
        if batch in self.state.committed:
            raise Violation(f"{batch} is committed twice")
        self._book("commit_batch")
        return self._go_on()

    def _do_train(self, name: str) -> None:
        batch, role = batch_of(self.state.step), self._role(name)
        if batch not in self.state.committed:
            raise Violation(f"{batch} is trained on without its commit")
        token = self.state.step.granted
        assert token is not None
        engine, may = trainer_train(role.engines[0], token)
        self._each_engine(name, 0, lambda _: engine)
        if not may:
            return self._failed()
        self._truth(trained=True)
        self._step(granted=None)
        return self._go_on()

    def _do_done(self, name: str) -> None:
        self._step(mode="down", pc=0)

    def _do_stop(self, name: str) -> None:
        failed = self.state.step.tries
        self._step(wait="answer", role=name, method="stop", token=None, tries=0)
        if failed:  # a person has looked, and ended what was left
            self._end_what_holds(name)
            self._ask(name, "resolve", None)
        self._ask(name, "stop", None)

    def _do_end(self, name: str) -> None:
        self._each_engine(name, 0, end_trainer)
        self._go_on()

    def _do_close(self, name: str) -> None:
        if not self.state.book.asleep and not self.state.anew.gone:
            raise Violation("the run ends and a role still has the lease")
        left = [n for n, r in zip(self.config.roles, self.state.roles, strict=True) if r.holding]
        if left:
            raise Violation(f"the run ends and {left} still hold")
        self._step(mode="ended")

    def _give_up(self) -> None:
        """Let go of what is held, close the batch's gate, then ask a person."""
        step, book = self.state.step, self.state.book
        if self.state.anew.gone and step.held:
            return self._step(held="")
        if step.held:
            self._step(role=step.held, method="offload", tries=_GIVING_UP, error="")
            if step.held in book.blocked:
                return self._step(wait="known")
            if books.refusal(book, "deactivate", role=step.held) is not None:
                return self._step(held="")
            return self._release()
        if self.state.anew.gone:
            self._begin_anew()
        if step.leases < self.state.anew.number:  # mirrors TrainingRun._lost_its_lease
            return self._try_again("run")
        batch = batch_of(step)
        pending = book.batch is not None and book.batch.state is BatchState.PENDING
        if pending and books.refusal(book, "fail_batch", batch=batch, message="x") is None:
            self._book("fail_batch", books.REASON)
        return self._step(mode="person")

    def _failed(self) -> None:
        """The present action failed for good."""
        step = self.state.step
        if step.mode == "down":
            return self._step(wait="")
        if step.mode == "giving_up":
            return self._step(wait="", held="")
        phase = STEP.advance(step.phase, _GAVE_UP)
        return self._step(mode="giving_up", wait="", granted=None, phase=phase)

    def _succeeded(self) -> None:
        step = self.state.step
        if step.method == "offload":
            self._step(held="")
        if step.mode == "giving_up":
            return self._step(wait="")
        if step.mode == "run" and self.config.plan[step.pc] == ("acquire", "trainer"):
            self._step(granted=self.state.book.lease("trainer").token)
        acknowledged = step.mode == "run" and self.config.plan[step.pc][0] == "acknowledge"
        batch = self.state.book.batch
        if acknowledged and batch is not None and batch.name == batch_of(step):
            self._book("note_rollout_released")
        return self._go_on()

    def _go_on(self) -> None:
        step = self.state.step
        self._step(pc=step.pc + 1, wait="", role="", method="", token=None, tries=0, error="")
        if step.mode == "run":
            for event in _PHASES.get(self.config.plan[step.pc + 1], ()):
                self._step(phase=STEP.advance(self.state.step.phase, event))


_OF_LEASE = frozenset(
    {
        *("begin_batch", "activate", "acquire", "deactivate", "release"),
        *("acknowledge", "commit"),
    }
)
"""What a step does that the lease is asked for."""
_GIVING_UP = 100
"""Tells the offload of a step that gives up from one that it asked for before."""
_GAVE_UP = StepEvent.GAVE_UP
_PHASES = {
    ("generate", "rollout"): (StepEvent.GENERATION_STARTED,),
    ("acknowledge", "rollout"): (StepEvent.GENERATED,),
    ("activate", "genrm"): (StepEvent.JUDGING_STARTED,),
    ("activate", "teacher"): (StepEvent.TEACHING_STARTED,),
    ("publish", ""): (StepEvent.SCORES_IN, StepEvent.WRITTEN_BACK),
    ("commit", ""): (StepEvent.PUBLISHED,),
    ("acquire", "trainer"): (StepEvent.FINALIZED, StepEvent.TRAINING_STARTED),
    ("acquire", "rollout"): (StepEvent.WEIGHT_SYNC_STARTED,),
    ("done", ""): (StepEvent.COMPLETED,),
}
