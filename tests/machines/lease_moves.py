"""What an event makes of a state, up to the decisions of the lease.

:class:`LeaseMoves` mirrors what ``GpuLease`` and the way to the engines do between two rules, under
the names that the methods have there.
"""

from relax_infer.machines import (
    GROUP,
    LEASE,
    GroupEvent,
    LeaseEvent,
    LeaseState,
    ReplicaState,
)
from tests.machines import books
from tests.machines.books import Violation
from tests.machines.groups import begin, finish, probe, resolve
from tests.machines.hazards import carried_out
from tests.machines.host import look, lose_actor, lose_server
from tests.machines.model import (
    Call,
    Zombie,
    batch_of,
)
from tests.machines.trainer import trainer_answer, trainer_look
from tests.machines.values import HOLDING, Answer, Report, Token
from tests.machines.working_copy import WorkingCopy
from workflows._failures import PERMANENT, UNCONFIRMED
from workflows.gpu_lease import GRANT_ATTEMPTS

PERSON = {"who": "a person", "why": "looked"}


class LeaseMoves(WorkingCopy):
    """A working copy of a state, with what the environment and the lease do."""

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
        if refused := books.refusal(book, "resolve", role=name, confirm_released=True, **PERSON):
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
        asked = books.refusal(self.state.book, "resolve", role=name, abandon=True, **PERSON)
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
