"""What an event makes of a state, up to the decisions of the lease.

:class:`LeaseMoves` mirrors what ``GpuLease``, ``InferenceRole`` and the way to the engines do
between two rules, under the names that the methods have there.
"""

from collections.abc import Callable

import workflows._lease_proving as proving
from relax_infer.machines import (
    LEASE,
    GroupState,
    LeaseEvent,
    LeaseState,
    ReplicaState,
)
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.groups import Turn, Work, advance
from tests.machines.hazards import carried_out, losses
from tests.machines.host import look, lose_actor, lose_server
from tests.machines.model import Role, batch_of
from tests.machines.recoveries import AGAIN, course, met
from tests.machines.trainer import (
    end_trainer,
    lose_trainer,
    trainer_answer,
    trainer_forget,
    trainer_look,
)
from tests.machines.values import (
    HOLDING,
    LOST,
    Answer,
    Call,
    Engine,
    Group,
    Recovery,
    Report,
    Token,
)
from tests.machines.working_copy import WorkingCopy
from workflows._failures import PERMANENT, UNCONFIRMED
from workflows.gpu_lease import GRANT_ATTEMPTS

PERSON = {"who": "a person", "why": "looked"}
QUICK, SLOW, UNHEARD = -1, -2, -9
"""Tell what a lease that was begun anew asks of what was left from what a step asks for: a request
to let go, one after which the lease hears late, and one whose answer nobody waits for."""
_EXCLUSIVE = ("onload", "offload", "stop")
"""Operations that a role carries out one at a time; it tells nobody of changes meanwhile."""


class LeaseMoves(WorkingCopy):
    """A working copy of a state, with what the environment and the lease do."""

    # --- the environment

    def on_answer(self, name: str, n: str, trouble: str = "", k: str = "") -> None:
        """An activity in flight reaches the engines and its answer comes back."""
        self._cost(bool(trouble))
        call = self._call(name, n)
        self._answer(name, call, self._execute(name, call, trouble, k))

    def on_request_lost(self, name: str, n: str) -> None:
        """It never reached the engines and may still; its asker is told that nobody knows."""
        self._cost()
        call = self._call(name, n)
        self._add_zombies(name, call, done=False)
        self._answer(name, call, LOST)

    def on_reply_lost(self, name: str, n: str) -> None:
        """The engines did it and nobody heard."""
        self._cost()
        call = self._call(name, n)
        self._execute(name, call, "", "")
        self._answer(name, call, LOST)

    def on_timeout(self, name: str) -> None:
        """The lease has waited long enough; the activity goes on."""
        self._cost()
        self._block(UNCONFIRMED)

    def on_late(self, name: str, kind: str, counter: str, replica: str, ends: str) -> None:
        """An operation that was asked for earlier reaches its engine."""
        self._cost()
        role, k = self._role(name), int(replica)
        lease = self.state.book.lease(name)
        zombies = self.state_before.roles[self.config.roles.index(name)].zombies
        zombie = next(
            z
            for z in sorted(zombies)
            if (z.kind, str(z.token.counter), z.replica) == (kind, counter, k)
            and z.ends == (ends == "ends")
            and not z.done
        )
        before = role.engines[k]
        engine, _ = carried_out(name, before, zombie, "")
        loads = kind in ("onload", "launch")
        granted = lease.state is LeaseState.ACTIVE or (loads and LEASE.holds(lease.state))
        granted = granted and name not in self.state.anew.left  # it may not have heard of its token
        newer = [token for token in (before.seen, lease.token if granted else None) if token]
        stale = any(zombie.token < token for token in newer)
        if stale and engine != before:
            raise Violation(f"{name}: {kind} of an earlier grant had an effect")
        self._each_engine(name, k, lambda _: engine)
        role = self._role(name)
        left = role.zombies - {zombie}
        if zombie in role.zombies:
            left |= {zombie._replace(done=True)}
        self._set_role(name, role._replace(zombies=left))

    def on_server_dies(self, name: str, k: str, orphan: str = "") -> None:
        self._cost()
        lose = lose_trainer if name == "trainer" else lose_server
        self._each_engine(name, int(k), lambda e: lose(e, orphan=bool(orphan)))
        if name == "trainer":
            self._forget_operations(name, 0)

    def on_actor_dies(self, name: str, k: str) -> None:
        """The server lives on; what the actor remembered of operations is gone."""
        self._cost()
        self._each_engine(name, int(k), lose_actor)
        self._forget_operations(name, int(k))

    def _forget_operations(self, name: str, k: int) -> None:
        role = self._role(name)
        forgotten = {z._replace(done=False) if z.replica == k else z for z in role.zombies}
        self._set_role(name, role._replace(zombies=frozenset(forgotten)))

    # --- what a group does by itself

    def on_again(self, name: str, n: str) -> None:
        """A BLOCKED recovery tries its proof again."""
        self._meet(name, int(n), AGAIN)

    def on_hear(self, name: str, n: str) -> None:
        """A recovery that was BLOCKED has ended, and the group has its turn."""
        recovery = self._role(name).group.recoveries[int(n)]
        self._begin(name, Work("hear", None, self._role(name).group, replica=recovery.replica))

    def on_notice(self, name: str) -> None:
        """The watch of a group ends: replicas are lost."""
        role = self._role(name)
        self._begin(name, Work("mend", None, role.group, results=(losses(role),)))

    def on_told(self, name: str) -> None:
        """Mirrors ``GpuLease.holder_lost``."""
        self._set_role(name, self._role(name)._replace(lost=False))
        if self.state.anew.gone:
            return
        if self.state.book.lease(name).state is LeaseState.ACTIVE:
            self._record(name, LeaseEvent.OPERATION_FAILED)

    # --- BLOCKED

    def on_probe(self, name: str) -> None:
        if name in self.state.anew.left:
            return self._have_let_go(name, QUICK)
        return self._look_at(name)

    def _look_at(self, name: str) -> None:
        role, token = self._role(name), self.state.book.lease(name).token
        if name == "trainer":
            return self._heard_probe(name, self._trainer(trainer_look), token)
        reports = tuple(look(engine) for engine in role.engines)
        what = self._probe(name, reports)
        asleep = (ReplicaState.SLEEPING, ReplicaState.DEAD)
        rests = role.work is None and not role.group.recoveries
        proved = all(r.state in asleep and r.fence == token for r in reports)
        if rests and proved and role.group.state is GroupState.BLOCKED and what == "BLOCKED":
            raise Violation(f"{name}: every engine proves its sleep and the probe says {what}")
        return self._heard_probe(name, what, token) if what else None

    def on_slow_probe(self, name: str) -> None:
        """The probe's answer is on its way while other things happen."""
        self._cost()
        if name in self.state.anew.left:
            return self._have_let_go(name, SLOW)
        return self._look_slowly_at(name)

    def _look_slowly_at(self, name: str) -> None:
        role, token = self._role(name), self.state.book.lease(name).token
        if name == "trainer":
            what = self._trainer(trainer_look)
        else:
            what = self._probe(name, tuple(look(engine) for engine in role.engines))
        if what and token is not None:
            self._hold_back(name, what, str(token.counter), token.grant_id)

    def on_held_back_answer(self, name: str, what: str, counter: str, grant_id: str) -> None:
        self.state = self.state._replace(held_back=())
        self._heard_probe(name, what, Token(int(counter), grant_id))

    def _probe(self, name: str, reports: tuple[Report, ...]) -> str:
        """What a probe says at once; "": it goes on, and is heard later."""
        role, token = self._role(name), self.state.book.lease(name).token
        work = Work("probe", token, role.group, results=(reports,))
        if role.work is None:
            at = advance(work, len(role.engines), role.group.recoveries)
            if at.answer is None:
                self._begin(name, work)
                return ""
            self._set_group(name, at.group, doing=False)
        else:
            at = advance(work, len(role.engines), role.group.recoveries, locked=True)
        assert at.answer is not None
        self._probe_is_legal(name, at.answer)
        return at.answer.state

    def _probe_is_legal(self, name: str, answer: Answer) -> None:
        if not answer.ok and answer.kind == PERMANENT:
            raise Violation(f"{name}: a probe was refused")

    def _trainer(self, ask: Callable[[Engine, Token], tuple[Engine, str]]) -> str:
        """What an activity that takes no time makes of the trainer, and says."""
        token = self.state.book.lease("trainer").token
        assert token is not None
        engine, said = ask(self._role("trainer").engines[0], token)
        self._each_engine("trainer", 0, lambda _: engine)
        return said

    def _heard_probe(self, name: str, what: str, token: Token | None) -> None:
        """Mirrors ``LeaseProving._reconcile_once`` after its await."""
        now = self.state.book.lease(name)
        if now.state is not LeaseState.BLOCKED or now.token != token:
            return
        proved = proving.what_it_proves(what, left=name in self.state.anew.left)
        if proved is LeaseEvent.RELEASE_PROVED and self._doubts(name):
            return
        if proved is not None:
            self._record(name, proved)
        self._known()

    def on_resolve(self, name: str, *, abandon: bool = False) -> None:
        """A person looks at the node, ends what is in doubt and still holds, and says so."""
        book = self.state.book
        self._resolved_without_looking(name)
        if refused := books.refusal(book, "resolve", role=name, confirm_released=True, **PERSON):
            raise Violation(f"a person cannot resolve a BLOCKED lease: {refused}")
        self._end_what_holds(name)
        told = "told" if self._role(name).doubted else ""
        self.state = self.state._replace(resolving=(name, "abandon" if abandon else "", told))
        token = self.state.book.lease(name).token
        if name == "trainer":
            said = self._trainer(trainer_forget)
            return self._heard_resolution(name, token, Answer(bool(said), state=said))
        return self._ask(name, "resolve", token)

    def on_resolve_unreachable(self, name: str) -> None:
        """The trainer's host is cut off: nothing holds there, and what was on its way may come."""
        self._end_what_holds(name)
        token = self.state.book.lease(name).token
        assert token is not None
        self._each_engine(name, 0, lambda e: e.with_closed(token))
        self.state = self.state._replace(resolving=(name, "", ""))
        self._heard_resolution(name, token, Answer(True, state="SLEEPING"))

    def on_resolve_and_abandon(self, name: str) -> None:
        self.on_resolve(name, abandon=True)

    def _heard_resolution(self, name: str, token: Token | None, answer: Answer) -> None:
        """Mirrors ``LeaseProving._resolve_role`` after its await."""
        _, abandon, told = self.state.resolving
        self.state = self.state._replace(resolving=())
        if not answer.ok:
            return
        now = self.state.book.lease(name)
        if now.state is LeaseState.BLOCKED and now.token == token:
            asleep = answer.state in ("SLEEPING", "STOPPED")
            if asleep and not told and self._doubts(name):
                return
            self._set_role(name, self._role(name)._replace(doubted=False))
            if answer.state in ("SLEEPING", "STOPPED"):
                self._record(name, LeaseEvent.RESOLVED_BY_OPERATOR)
            elif answer.state == "READY":
                self.on_probe(name)
            else:
                return
        if abandon:
            self._book("abandon_batch")
        self._known()

    def _resolved_without_looking(self, name: str) -> None:
        """Somebody resolves without confirm_released. Carried out, it would free what holds."""
        asked = books.refusal(self.state.book, "resolve", role=name, abandon=True, **PERSON)
        if asked is None and self._role(name).holding:
            raise Violation(f"{name} was resolved by somebody who did not look, while it holds")

    def _end_what_holds(self, name: str) -> None:
        role = self._role(name)
        failed = {k for k, state in role.group.records if state is ReplicaState.FAILED}
        every = role.doubted or name == "trainer"
        end = end_trainer if name == "trainer" else lambda e: lose_server(e, orphan=False)
        engines = tuple(
            end(e) if e.gpu in HOLDING and (every or k in failed) else e
            for k, e in enumerate(role.engines)
        )
        self._set_role(name, role._replace(engines=engines))
        if name == "trainer":
            self._forget_operations(name, 0)

    def _have_let_go(self, name: str, nth: int) -> None:
        raise NotImplementedError

    def _heard_letting_go(self, name: str, work: Work, answer: Answer) -> None:
        raise NotImplementedError

    # --- the lease

    def _take(self, method: str, name: str, **fields: str) -> None:
        self._step(held=name, method=method, role=name, tries=0, error="")
        if books.in_doubt_for(self.state.book, name):
            return self._step(wait="doubt")
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
        if lease.state is LeaseState.BLOCKED:
            return self._step(wait="known", error="")
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
        anew, step, book = self.state.anew, self.state.step, self.state.book
        if anew.left:
            left = tuple(role for role in anew.left if role in book.blocked)
            self.state = self.state._replace(anew=anew._replace(left=left))
        if step.wait == "doubt" and not books.in_doubt_for(book, step.role):
            method, fields = self._request()
            return self._take(method, step.role, **fields)
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

    def _ask(self, name: str, method: str, token: Token | None, nth: int | None = None) -> None:
        role = self._role(name)
        if nth is None:
            nth = 0 if method == "resolve" else self.state.step.tries
        ask = (method, token, nth)
        self._set_role(name, role._replace(inbox=(*role.inbox, ask)))
        self._serve(name)

    def _serve(self, name: str) -> None:
        """The lifecycle begins the next operation once it has its turn."""
        role = self._role(name)
        if role.work is not None or not role.inbox:
            return
        method, token, nth = role.inbox[0]
        moving = [r for r in role.group.recoveries if not course(r).blocked]
        if method == "stop" and moving:
            return
        self._set_role(name, role._replace(inbox=role.inbox[1:]))
        work = Work(method, token, role.group, nth)
        if name == "trainer":
            assert token is not None
            call = Call(method, token, (0,), ends=True)
            self._set_role(name, self._role(name)._replace(work=work, own=call))
        else:
            self._begin(name, work)

    def _begin(self, name: str, work: Work) -> None:
        self._set_role(name, self._role(name)._replace(work=work))
        self._advance(name)

    def _advance(self, name: str, recoveries: tuple[Recovery, ...] | None = None) -> None:
        """The operation at work goes on as far as it comes; ``recoveries`` have come further."""
        role = self._role(name)
        work = role.work
        assert work is not None
        at: Turn = advance(work, len(role.engines), recoveries or role.group.recoveries)
        doing = [work.method, *(method for method, *_ in role.inbox)]
        self._set_group(name, at.group, doing=any(method in _EXCLUSIVE for method in doing))
        over = at.answer is not None
        role = self._role(name)._replace(work=None if over else work, own=at.call)
        self._set_role(name, role)
        if at.answer is not None:
            self._heard(name, work, at.answer)
            self._serve(name)

    def _set_group(self, name: str, group: Group, *, doing: bool) -> None:
        """Mirrors ``InferenceRole.group_changed``: the lease hears of a holder that is lost."""
        before = self._role(name)
        after = before._replace(group=group)
        if not doing:
            states = (before.group.state, group.state)
            stopped = states == (GroupState.BLOCKED, GroupState.SLEEPING)
            if (after.stuck and not before.stuck) or (stopped and not after.stuck):
                after = after._replace(lost=True)
        self._set_role(name, after)

    def _meet(self, name: str, n: int, what: tuple[Report, ...] | str) -> None:
        """A recovery goes on, and with it the operation that waits for it."""
        role = self._role(name)
        recoveries = list(role.group.recoveries)
        recoveries[n] = met(recoveries[n], what)
        group = role.group._replace(recoveries=tuple(recoveries))
        if role.work is not None:
            return self._advance(name, group.recoveries)
        self._set_group(name, group, doing=False)
        return self._serve(name)

    def _execute(self, name: str, call: Call, trouble: str, k: str) -> tuple[Report, ...]:
        """The engines carry out an operation in flight; a duplicate of it may come later."""
        done = {
            at: carried_out(
                name, self._role(name).engines[at], call, trouble if str(at) == k else ""
            )
            for at in call.replicas
        }
        for at, (engine, _) in done.items():
            self._each_engine(name, at, lambda _, engine=engine: engine)
        reports = tuple(report for _, report in done.values())
        # The trainer records no failure: asked again, it tries again.
        self._add_zombies(name, call, done=name != "trainer" or not reports[0].error)
        for at, (_, report) in done.items():
            if call.kind == "stop" and report.state is ReplicaState.DEAD and not report.error:
                self._forget_operations(name, at)
        return reports

    def _answer(self, name: str, call: Call, came: tuple[Report, ...] | str) -> None:
        role = self._role(name)
        if call.recovery >= 0:
            return self._meet(name, call.recovery, came)
        work = role.work
        assert work is not None
        if name == "trainer":
            self._set_role(name, role._replace(work=None, own=None))
            self._heard(name, work, trainer_answer(came))
            return self._serve(name)
        work = work._replace(results=(*work.results, came))
        self._set_role(name, role._replace(work=work))
        return self._advance(name)

    def _heard(self, name: str, work: Work, answer: Answer) -> None:
        """An operation ended; its asker hears of it."""
        if work.nth == UNHEARD:
            self._late_answer(name)
        elif work.nth in (QUICK, SLOW):
            self._heard_letting_go(name, work, answer)
        elif work.method == "probe":
            self._probe_is_legal(name, answer)
            self._heard_probe(name, answer.state if answer.ok else "", work.asked)
        elif work.method == "resolve" and work.asked is not None:
            self._heard_resolution(name, work.asked, answer)
        elif work.method in _EXCLUSIVE:
            self._hear(name, (work.method, work.asked, work.nth), answer)

    def _hear(self, name: str, asked: tuple[str, Token | None, int], answer: Answer) -> None:
        """An answer arrives at its asker; one that nobody waits for is dropped."""
        step, method = self.state.step, asked[0]
        awaited = (step.role, step.method, step.token, step.tries)
        if step.wait != "answer" or awaited != (name, *asked):
            return self._late_answer(name)
        if method == "stop":
            if answer.kind == PERMANENT:
                raise Violation(f"{name}: a stop was refused")
            return self._succeeded() if answer.ok else self._step(wait="", tries=1)
        if not answer.ok:
            return self._block(answer.kind)
        if method == "onload":
            self._record(name, LeaseEvent.ONLOAD_CONFIRMED)
            return self._succeeded()
        if self._doubts(name):
            return self._block(PERMANENT)
        self._record(name, LeaseEvent.RELEASE_CONFIRMED)
        return self._succeeded()

    def _doubts(self, name: str) -> bool:
        """Mirrors ``LeaseCore._judge``: the evidence tells whether something is still held."""
        role: Role = self._role(name)
        if role.holding and "memory_not_freed" in self.config.allow:
            self._set_role(name, role._replace(doubted=True))
            return True
        return False

    def _late_answer(self, name: str) -> None:
        lease = self.state.book.lease(name)
        for event in (LeaseEvent.RELEASE_CONFIRMED, LeaseEvent.ONLOAD_CONFIRMED):
            if lease.state is LeaseState.BLOCKED and LEASE.allows(lease.state, event):
                raise Violation(f"{name}: a late success alone could change the book ({event})")
