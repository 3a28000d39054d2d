"""What may happen in a state of the model, and what then is: :func:`events`, :func:`after_event`.

:class:`_Next` is a working copy of a state. Its methods mirror what the workflows do between two
rules, under the names that the methods have there.
"""

from relax_infer.machines import (
    GROUP,
    LEASE,
    STEP,
    BatchState,
    GroupEvent,
    IllegalTransition,
    LeaseEvent,
    LeaseState,
    ReplicaState,
    StepEvent,
)
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.model import (
    Call,
    Config,
    Event,
    Role,
    State,
    Truth,
    Zombie,
    batch_of,
)
from tests.machines.parts import (
    HOLDING,
    Answer,
    Engine,
    Gpu,
    Report,
    Token,
    begin,
    finish,
    look,
    lose_actor,
    lose_server,
    operate,
    probe,
    resolve,
)
from tests.machines.trainer import trainer_answer, trainer_look, trainer_operate
from workflows._failures import PERMANENT, UNCONFIRMED
from workflows._lease_book import LeaseRefused
from workflows.gpu_lease import GRANT_ATTEMPTS

FAULTS = frozenset(
    {
        *("request_lost", "reply_lost", "timeout", "late", "slow_probe", "slow_resolve"),
        *("server_dies", "actor_dies", "phase_fails"),
    }
)
"""Events that spend the budget; an answer after a trouble does too."""
TROUBLES = ("launch", "load", "drain", "prove", "keep")
_PERSON = {"who": "a person", "why": "looked"}


def carried_out(role: str, engine: Engine, method: str, token: Token, trouble: str):
    """The engine after an operation reached it, and its report."""
    work = trainer_operate if role == "trainer" else operate
    return work(engine, method, token, trouble)


def events(config: Config, state: State) -> list[Event]:
    """Everything that may happen now."""
    if state.step.mode == "ended":
        return []
    found: list[Event] = []
    if not state.step.wait:
        found += _of_step(config, state)
    for name, role in zip(config.roles, state.roles, strict=True):
        found += _of_call(config, state, name, role)
        found += _of_blocked(config, state, name, role)
        if state.faults:
            found += _of_faults(config, state, name, role)
    found += [("held_back_answer", *answer) for answer in state.held_back]
    only = config.only
    return found if only is None else [e for e in found if not _is_fault(e) or e[0] in only]


def _is_fault(event: Event) -> bool:
    return event[0] in FAULTS or (event[0] == "answer" and len(event) > 2)


def _of_step(config: Config, state: State) -> list[Event]:
    if state.step.mode == "person":
        again: list[Event] = [("person", "retry")] if state.step.attempt < config.attempts else []
        return [*again, ("person", "stop")]
    work = ("generate", "score", "publish", "train")
    at = config.plan[state.step.pc][0] if state.step.mode == "run" else ""
    working = at in work and state.faults
    return [("next",), *([("phase_fails",)] if working else [])]


def _of_call(config: Config, state: State, name: str, role: Role) -> list[Event]:
    call = role.call
    if call is None:
        return []
    found: list[Event] = [("answer", name)]
    known_fault = call.method == "stop" and "stop_fails" not in config.allow
    if state.faults and not (known_fault and config.replicas > 1):
        for k, engine in enumerate(role.engines):
            clean = carried_out(name, engine, call.method, call.token, "")
            found += [
                ("answer", name, trouble, str(k))
                for trouble in TROUBLES
                if carried_out(name, engine, call.method, call.token, trouble) != clean
                and _tried(config, name, trouble)
            ]
    if state.faults and not known_fault:
        found += [("request_lost", name), ("reply_lost", name)]
    return found


def _tried(config: Config, name: str, trouble: str) -> bool:
    if trouble == "keep":
        return name != "trainer" and "memory_not_freed" in config.allow
    return (name, trouble) != ("trainer", "load") or "trainer_partial" in config.allow


def _of_blocked(config: Config, state: State, name: str, role: Role) -> list[Event]:
    lease = state.book.lease(name)
    if lease.state is not LeaseState.BLOCKED:
        return []
    loading = "onload" in (role.call.method if role.call else "", *(m for m, *_ in role.inbox))
    found: list[Event] = []
    launching = loading and any(e.state is ReplicaState.DEAD for e in role.engines)
    asking = any(kind == "probe" for kind, *_ in state.held_back)  # one probe at a time
    if not asking and (not launching or "probe_while_launching" in config.allow):
        found.append(("probe", name))
        if state.faults and "slow_probe" in config.allow:
            found.append(("slow_probe", name))
    if not loading or "resolve_while_loading" in config.allow:
        found += [("resolve", name), ("resolve_and_abandon", name)]
        if state.faults and "slow_resolve" in config.allow and not state.held_back:
            found.append(("slow_resolve", name))
    return found


def _of_faults(config: Config, state: State, name: str, role: Role) -> list[Event]:
    found: list[Event] = []
    step = state.step
    if step.wait == "answer" and step.role == name and step.method != "stop" and name != "trainer":
        found.append(("timeout", name))
    for zombie in sorted(role.zombies):
        up = state.book.holds(name) and (name == "trainer" or GROUP.holds(role.group.state))
        harmless = zombie.method != "onload" or up
        stale = all(e.seen is not None and e.seen > zombie.token for e in role.engines)
        if not zombie.done and (harmless or stale or "late_onload" in config.allow):
            found.append(("late", name, zombie.method, str(zombie.token.counter)))
    for k, engine in enumerate(role.engines):
        if engine.gpu in (Gpu.ASLEEP, Gpu.PARTIAL, Gpu.FULL):
            found.append(("server_dies", name, str(k)))
        if engine.gpu in (Gpu.PARTIAL, Gpu.FULL) and (
            name != "trainer" or "trainer_orphan" in config.allow
        ):
            found.append(("server_dies", name, str(k), "orphan"))
        if engine.holder == "own":
            found.append(("actor_dies", name, str(k)))
    return found


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


class _Next:
    """A working copy of a state."""

    def __init__(self, config: Config, state: State) -> None:
        self.config, self.state = config, state

    # --- the environment

    def on_answer(self, name: str, trouble: str = "", k: str = "") -> None:
        """The activity in flight reaches the engines and its answer comes back."""
        self._cost(bool(trouble))
        self._answer(name, self._execute(name, trouble, k))

    def on_request_lost(self, name: str) -> None:
        """It never reached the engines and may still; its asker is told that nobody knows."""
        self._cost()
        call = self._call(name)
        self._add_zombie(name, Zombie(call.method, call.token, done=False))
        self._answer(name, ())

    def on_reply_lost(self, name: str) -> None:
        """The engines did it and nobody heard."""
        self._cost()
        self._execute(name, "", "")
        self._answer(name, ())

    def on_timeout(self, name: str) -> None:
        """The lease has waited long enough; the activity goes on."""
        self._cost()
        self._block(UNCONFIRMED)

    def on_late(self, name: str, method: str, counter: str) -> None:
        """An operation of an earlier grant reaches the engines."""
        self._cost()
        role = self._role(name)
        zombie = next(
            z
            for z in sorted(role.zombies)
            if z.method == method and str(z.token.counter) == counter and not z.done
        )
        engines = tuple(carried_out(name, e, method, zombie.token, "")[0] for e in role.engines)
        lease = self.state.book.lease(name)
        current = lease.token is not None and lease.state is LeaseState.ACTIVE
        for before, now in zip(role.engines, engines, strict=True):
            newer = [before.seen, lease.token if current else None]
            stale = any(token is not None and zombie.token < token for token in newer)
            if stale and now != before:
                raise Violation(f"{name}: {method} of an earlier grant had an effect")
        zombies = role.zombies - {zombie} | {zombie._replace(done=True)}
        self._set_role(name, role._replace(engines=engines, zombies=zombies))

    def on_server_dies(self, name: str, k: str, orphan: str = "") -> None:
        self._cost()
        self._each_engine(name, int(k), lambda e: lose_server(e, orphan=bool(orphan)))
        if name == "trainer":
            self._forget_operations(name)

    def on_actor_dies(self, name: str, k: str) -> None:
        """The server lives on; what the actor remembered of operations is gone."""
        self._cost()
        self._each_engine(name, int(k), lose_actor)
        self._forget_operations(name)

    def _forget_operations(self, name: str) -> None:
        role = self._role(name)
        forgotten = frozenset(z._replace(done=False) for z in role.zombies)
        self._set_role(name, role._replace(zombies=forgotten))

    # --- BLOCKED

    def on_probe(self, name: str) -> None:
        role, token = self._role(name), self.state.book.lease(name).token
        what = self._probe(name)
        if name != "trainer" and role.call is None and what != "SLEEPING":
            reports = [look(engine) for engine in role.engines]
            if all((r.state, r.fence) == (ReplicaState.SLEEPING, token) for r in reports):
                raise Violation(f"{name}: every engine proves its sleep and the probe says {what}")
        self._heard_probe(name, what)

    def on_slow_probe(self, name: str) -> None:
        """The probe's answer is on its way while other things happen."""
        self._cost()
        self._hold_back("probe", name, self._probe(name))

    def on_held_back_answer(self, kind: str, name: str, what: str) -> None:
        self.state = self.state._replace(held_back=())
        if kind == "probe":
            return self._heard_probe(name, what)
        self._record(name, LeaseEvent.RESOLVED_BY_OPERATOR)
        return self._known()

    def on_resolve(self, name: str, *, abandon: bool = False) -> None:
        """A person looks at the node, ends what still holds, and says so."""
        book = self.state.book
        self._resolved_without_looking(name)
        if refused := books.refusal(book, "resolve", role=name, confirm_released=True, **_PERSON):
            raise Violation(f"a person cannot resolve a BLOCKED lease: {refused}")
        self._end_what_holds(name)
        self._resolve_group(name)
        self._record(name, LeaseEvent.RESOLVED_BY_OPERATOR)
        if abandon and not self.state.book.blocked:
            self._book("abandon_batch")
        self._known()

    def on_slow_resolve(self, name: str) -> None:
        """The engines were told of the resolution; the lease hears their answer later."""
        self._cost()
        self._end_what_holds(name)
        self._resolve_group(name)
        self._hold_back("resolve", name, "")

    def on_resolve_and_abandon(self, name: str) -> None:
        self.on_resolve(name, abandon=True)

    def _resolved_without_looking(self, name: str) -> None:
        """Somebody resolves without confirm_released. Carried out, it would free what holds."""
        asked = books.refusal(self.state.book, "resolve", role=name, abandon=True, **_PERSON)
        if asked is None and self._role(name).holding:
            raise Violation(f"{name} was resolved by somebody who did not look, while it holds")

    def _end_what_holds(self, name: str) -> None:
        role = self._role(name)
        engines = tuple(
            lose_server(e, orphan=False) if e.gpu in HOLDING else e for e in role.engines
        )
        self._set_role(name, role._replace(engines=engines))

    def _resolve_group(self, name: str) -> None:
        if name == "trainer":
            return
        role = self._role(name)
        group = role.group
        up = GROUP.allows(group.state, GroupEvent.OPERATION_UNCONFIRMED)
        if up and role.call is None and "resolve_leaves_group" not in self.config.allow:
            blocked = GROUP.advance(group.state, GroupEvent.OPERATION_UNCONFIRMED)
            group = group._replace(state=blocked)
        self._set_role(name, role._replace(group=resolve(group, len(role.engines))))

    def _probe(self, name: str) -> str:
        role = self._role(name)
        token = self.state.book.lease(name).token
        if name == "trainer":
            return trainer_look(role.engines[0], token)
        reports = tuple(look(engine) for engine in role.engines)
        busy = role.call is not None
        group, answer = probe(role.group, token, reports, busy=busy)
        self._set_role(name, role._replace(group=group))
        return answer.state

    def _heard_probe(self, name: str, what: str) -> None:
        if self.state.book.lease(name).state is not LeaseState.BLOCKED:
            return
        if what in ("SLEEPING", "STOPPED"):
            self._record(name, LeaseEvent.RELEASE_PROVED)
        elif what == "READY":
            self._record(name, LeaseEvent.ACTIVE_PROVED)
        self._known()

    # --- the lease

    def _take(self, method: str, name: str, **fields: str) -> None:
        self._step(held=name, method=method, role=name, tries=0, error="")
        if books.refusal(self.state.book, method, **fields) is not None:
            return self._failed()
        if method == "begin_batch":
            self._book("begin_batch", batch_of(self.state.step))
        return self._grant()

    def _grant(self) -> None:
        name = self.state.step.role
        if self.state.book.lease(name).state is LeaseState.ACTIVE:
            return self._succeeded()
        before = self.state.book.counter
        self._book("grant", name, f"g{before + 1}.{self.state.step.tries}")
        if self.state.book.counter <= before:
            raise Violation(f"a grant came without a new fence: {before} again")
        token = self.state.book.lease(name).token
        self._step(wait="answer", method="onload", token=token)
        return self._ask(name, "onload", token)

    def _release(self) -> None:
        name = self.state.step.role
        lease = self.state.book.lease(name)
        if lease.state is LeaseState.SLEEPING:
            return self._succeeded()
        if lease.state is not LeaseState.ACTIVE:
            return self._failed()
        self._record(name, LeaseEvent.DRAIN_STARTED)
        self._step(wait="answer", method="offload", token=lease.token)
        return self._ask(name, "offload", lease.token)

    def _block(self, kind: str) -> None:
        event = LeaseEvent.TIMED_OUT if kind == UNCONFIRMED else LeaseEvent.OPERATION_FAILED
        self._record(self.state.step.role, event)
        self._step(wait="known", error=kind)

    def _known(self) -> None:
        """Go on with the operation that waited, once the lease knows where its role stands."""
        step, book = self.state.step, self.state.book
        if step.wait != "known" or step.role in book.blocked:
            return None
        if step.method == "offload":
            # Only to tell the next offload from the last few: the number need not grow for ever.
            self._step(tries=step.tries - step.tries % 4 + (step.tries + 1) % 4)
            return self._release()
        self._step(tries=step.tries + 1)
        if book.lease(step.role).state is LeaseState.ACTIVE:
            return self._succeeded()
        if step.tries + 1 >= GRANT_ATTEMPTS or step.error == PERMANENT:
            return self._failed()
        method, fields = self._request()
        if books.refusal(book, method, **fields) is not None:
            return self._failed()
        return self._grant()

    def _request(self) -> tuple[str, dict[str, str]]:
        """The lease request that the step's present action makes."""
        step = self.state.step
        method, name = self.config.plan[step.pc]
        if method == "begin_batch":
            return method, {"batch": batch_of(step)}
        if method == "activate":
            return method, {"role": name, "batch": batch_of(step)}
        purpose = "train" if name == "trainer" else "weight_sync"
        batch = {"batch": batch_of(step)} if name == "trainer" else {}
        return method, {"role": name, "purpose": purpose, **batch}

    # --- the way to the engines and back

    def _ask(self, name: str, method: str, token: Token | None) -> None:
        role = self._role(name)
        ask = (method, token, self.state.step.tries)
        self._set_role(name, role._replace(inbox=(*role.inbox, ask)))
        self._serve(name)

    def _serve(self, name: str) -> None:
        """The lifecycle begins the next operation once it is idle."""
        role = self._role(name)
        if role.call is not None or not role.inbox:
            return
        method, token, nth = role.inbox[0]
        role = role._replace(inbox=role.inbox[1:])
        if name == "trainer":
            assert token is not None
            self._set_role(name, role._replace(call=Call(method, token, token, role.group, nth)))
            return
        group, used, answer = begin(role.group, len(role.engines), method, token)
        if answer is None:
            assert used is not None
            call = Call(method, token, used, role.group, nth)
            self._set_role(name, role._replace(group=group, call=call))
            return
        self._set_role(name, role._replace(group=group))
        self._hear(name, (method, token, nth), answer)
        self._serve(name)

    def _execute(self, name: str, trouble: str, k: str) -> tuple[Report, ...]:
        """The engines carry out the operation in flight; a duplicate of it may come later."""
        role, call = self._role(name), self._call(name)
        done = [
            carried_out(name, e, call.method, call.token, trouble if str(at) == k else "")
            for at, e in enumerate(role.engines)
        ]
        self._set_role(name, role._replace(engines=tuple(engine for engine, _ in done)))
        self._add_zombie(name, Zombie(call.method, call.token, done=True))
        return tuple(report for _, report in done)

    def _answer(self, name: str, reports: tuple[Report, ...]) -> None:
        role, call = self._role(name), self._call(name)
        if name == "trainer":
            answer = trainer_answer(reports)
            self._set_role(name, role._replace(call=None))
        else:
            replicas = len(role.engines)
            group, answer = finish(call.before, replicas, call.method, call.asked, reports)
            self._set_role(name, role._replace(group=group, call=None))
        self._hear(name, (call.method, call.asked, call.nth), answer)
        self._serve(name)

    def _hear(self, name: str, asked: tuple[str, Token | None, int], answer: Answer) -> None:
        """An answer arrives at its asker; one that nobody waits for is dropped."""
        step, method = self.state.step, asked[0]
        awaited = (step.role, step.method, step.token, step.tries)
        if step.wait != "answer" or awaited != (name, *asked):
            return self._late_answer(name)
        if method == "stop":
            return self._succeeded() if answer.ok else self._step(wait="")
        if not answer.ok:
            return self._block(answer.kind)
        if method == "onload":
            self._record(name, LeaseEvent.ONLOAD_CONFIRMED)
            return self._succeeded()
        self._record(name, LeaseEvent.RELEASE_CONFIRMED)
        # The client judges the evidence after the lease took the pool back.
        return self._failed() if self._role(name).holding else self._succeeded()

    def _late_answer(self, name: str) -> None:
        lease = self.state.book.lease(name)
        for event in (LeaseEvent.RELEASE_CONFIRMED, LeaseEvent.ONLOAD_CONFIRMED):
            if lease.state is LeaseState.BLOCKED and LEASE.allows(lease.state, event):
                raise Violation(f"{name}: a late success alone could change the book ({event})")

    # --- the step

    def on_next(self) -> None:
        """The step does what comes next."""
        step = self.state.step
        if step.mode == "giving_up":
            return self._give_up()
        plan = self.config.way_down if step.mode == "down" else self.config.plan
        method, name = plan[step.pc]
        if method in ("begin_batch", "activate", "acquire"):
            method, fields = self._request()
            return self._take(method, name, **fields)
        if method in ("deactivate", "release"):
            self._step(role=name, method="offload", tries=0, error="")
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
        asked = {**_PERSON, "confirm_released": True, "abandon": True}
        if books.refusal(self.state.book, "resolve", **asked) is not None:
            raise Violation("a person cannot abandon the batch of a step that gave up")
        self._book("abandon_batch")
        attempt = self.state.step.attempt + (decision == "retry")
        mode = "run" if decision == "retry" else "down"
        self.state = self.state._replace(truth=Truth(), step=type(self.state.step)(mode=mode))
        self._step(attempt=attempt)

    def _do_generate(self, name: str) -> None:
        if self._works(name):
            self._truth(generated=True)
            self._go_on()

    def _do_score(self, name: str) -> None:
        if self._works(name):
            self._truth(scored=(*self.state.truth.scored, name))
            self._go_on()

    def _works(self, name: str) -> bool:
        """Whether every engine of the role answers; if not, the step gives up."""
        engines = self._role(name).engines
        for engine in engines:
            if engine.gate and engine.gpu is not Gpu.FULL:
                raise Violation(f"{name}: an incomplete engine answers")
        if all(engine.gate for engine in engines):
            return True
        self._failed()
        return False

    def _do_acknowledge(self, name: str) -> None:
        batch = batch_of(self.state.step)
        self._step(role=name, method="offload", tries=0, error="")
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
        if batch in book.committed:
            raise Violation(f"{batch} is committed twice")
        self._book("commit_batch")
        return self._go_on()

    def _do_train(self, name: str) -> None:
        batch, role = batch_of(self.state.step), self._role(name)
        if batch not in self.state.book.committed:
            raise Violation(f"{batch} is trained on without its commit")
        if role.engines[0].gpu is Gpu.ORPHAN:
            return self._failed()
        # A trainer that died under this very grant loads again.
        self._each_engine(name, 0, lambda e: e._replace(gpu=Gpu.FULL))
        self._truth(trained=True)
        return self._go_on()

    def _do_done(self, name: str) -> None:
        self._step(mode="down", pc=0)

    def _do_stop(self, name: str) -> None:
        self._step(wait="answer", role=name, method="stop", token=None)
        self._ask(name, "stop", None)

    def _do_end(self, name: str) -> None:
        self._each_engine(name, 0, lambda e: e._replace(gpu=Gpu.NONE))
        self._go_on()

    def _do_close(self, name: str) -> None:
        if not self.state.book.asleep:
            raise Violation("the run ends and a role still has the lease")
        left = [n for n, r in zip(self.config.roles, self.state.roles, strict=True) if r.holding]
        if left:
            raise Violation(f"the run ends and {left} still hold")
        self._step(mode="ended")

    def _give_up(self) -> None:
        """Let go of what is held, close the batch's gate, then ask a person."""
        step, book = self.state.step, self.state.book
        if step.held:
            self._step(role=step.held, method="offload", tries=_GIVING_UP, error="")
            if books.refusal(book, "deactivate", role=step.held) is not None:
                return self._step(held="")
            return self._release()
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
        return self._step(mode="giving_up", wait="", phase=STEP.advance(step.phase, _GAVE_UP))

    def _succeeded(self) -> None:
        step = self.state.step
        if step.method == "offload":
            self._step(held="")
        if step.mode == "giving_up":
            return self._step(wait="")
        if step.mode == "run" and self.config.plan[step.pc][0] == "acknowledge":
            self._book("note_rollout_released")
        return self._go_on()

    def _go_on(self) -> None:
        step = self.state.step
        self._step(pc=step.pc + 1, wait="", role="", method="", token=None, tries=0, error="")
        if step.mode == "run":
            for event in _PHASES.get(self.config.plan[step.pc + 1], ()):
                self._step(phase=STEP.advance(self.state.step.phase, event))

    # --- pieces

    def _book(self, what: str, *args: object) -> None:
        try:
            self.state = self.state._replace(book=books.after(self.state.book, what, *args))
        except AssertionError as error:
            raise Violation(
                f"{what} fails an assertion: the lease workflow stands still"
            ) from error

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

    def _each_engine(self, name, at, change) -> None:
        role = self._role(name)
        engines = tuple(change(e) if k == at else e for k, e in enumerate(role.engines))
        self._set_role(name, role._replace(engines=engines))


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
