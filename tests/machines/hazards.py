"""What may happen in a state of the model: :func:`events`."""

from relax_infer.machines import (
    GroupState,
    LeaseState,
    ReplicaState,
)
from tests.machines.host import health, look, lose_actor, lose_server, operate
from tests.machines.model import (
    Config,
    Event,
    Role,
    State,
    Zombie,
    has_left,
)
from tests.machines.recoveries import course
from tests.machines.trainer import trainer_operate
from tests.machines.values import Call, Engine, Gpu, Report

FAULTS = frozenset(
    {
        *("request_lost", "reply_lost", "timeout", "late", "slow_probe"),
        *("server_dies", "actor_dies", "phase_fails"),
    }
)
"""Events that spend the budget; an answer after a trouble does too."""
LOST_LEASES = frozenset({"lease_lost", "unanswered"})
"""More of them, where a lease may be lost."""
TROUBLES = ("launch", "load", "drain", "prove", "keep", "owe", "unreachable")
_NAMED = {"keep": "memory_not_freed", "owe": "memory_owed"}
"""Those that happen only in searches about them, and by which name."""


def carried_out(
    role: str, engine: Engine, call: Call | Zombie, trouble: str
) -> tuple[Engine, Report]:
    """The engine after an operation reached it, and its report.

    An actor whose engine was stopped with proof is ended, as ``EngineGroup.stop`` does.
    """
    if role == "trainer":
        return trainer_operate(engine, call.kind, call.token, trouble)
    if call.kind == "probe":
        return engine, look(engine)
    if call.kind == "forget" and trouble == "unreachable":
        gone = lose_server(engine, orphan=False).with_closed(call.token)  # as the person says
        return gone, Report(ReplicaState.FAILED, None, error=True, silent=True)
    engine, report = operate(engine, call.kind, call.token, trouble, ends=call.ends)
    if call.kind == "stop" and report.state is ReplicaState.DEAD and not report.error:
        engine = lose_actor(engine)
    return engine, report


def events(config: Config, state: State) -> list[Event]:
    """Everything that may happen now."""
    if state.step.mode == "ended":
        return []
    found: list[Event] = []
    if not state.step.wait:
        found += _of_step(config, state)
    found += _of_lease(config, state)
    for name, role in zip(config.roles, state.roles, strict=True):
        found += _of_call(config, state, name, role)
        found += _of_group(name, role)
        found += _of_blocked(config, state, name, role)
        if state.faults:
            found += _of_faults(config, state, name, role)
    found += [("held_back_answer", *answer) for answer in state.held_back]
    only = config.only
    found = [e for e in found if e[0] not in config.without]
    return found if only is None else [e for e in found if not _is_fault(e) or e[0] in only]


def _is_fault(event: Event) -> bool:
    return event[0] in FAULTS | LOST_LEASES or (event[0] == "answer" and len(event) > 3)


def _of_step(config: Config, state: State) -> list[Event]:
    if state.step.mode == "person":
        again: list[Event] = [("person", "retry")] if state.step.attempt < config.attempts else []
        return [*again, ("person", "stop")]
    work = ("generate", "score", "publish", "train")
    at = config.plan[state.step.pc][0] if state.step.mode == "run" else ""
    working = at in work and state.faults
    return [("next",), *([("phase_fails",)] if working else [])]


def _of_lease(config: Config, state: State) -> list[Event]:
    """That it is ended by hand, and that somebody notices."""
    found: list[Event] = []
    if state.step.wait == "gone":
        found.append(("asks_again",))
    if state.anew.gone:
        return [*found, *([("word_anew",)] if state.book.blocked else [])]
    if state.faults and "lease_lost" in config.allow:
        found.append(("lease_lost",))
        if "trainer" in config.roles and state.roles[config.roles.index("trainer")].own:
            found.append(("lease_lost", "reached"))
    return found


def _of_call(config: Config, state: State, name: str, role: Role) -> list[Event]:
    found: list[Event] = []
    for n, call in enumerate(role.calls):
        found.append(("answer", name, str(n)))
        if not state.faults or call.kind == "probe":
            continue
        for k in call.replicas:
            clean = carried_out(name, role.engines[k], call, "")
            found += [
                ("answer", name, str(n), trouble, str(k))
                for trouble in TROUBLES
                if carried_out(name, role.engines[k], call, trouble) != clean
                and _tried(config, trouble)
            ]
        found += [("request_lost", name, str(n)), ("reply_lost", name, str(n))]
    return found


def _tried(config: Config, trouble: str) -> bool:
    return trouble not in _NAMED or _NAMED[trouble] in config.allow


def _of_group(name: str, role: Role) -> list[Event]:
    """What a group does by itself."""
    found: list[Event] = [("told", name)] if role.lost else []
    for n, recovery in enumerate(role.group.recoveries):
        at = course(recovery)
        if at.blocked:
            found.append(("again", name, str(n)))
        elif at.result is not None and role.work is None:
            found.append(("hear", name, str(n)))
    if role.work is None and any(losses(role)):
        found.append(("notice", name))
    return found


def losses(role: Role) -> tuple[Report | None, ...]:
    """Of a group that is READY: each replica that should answer, and does not, as it is seen."""
    if role.group.state is not GroupState.READY:
        return ()
    ready = [k for k, state in role.group.records if state is ReplicaState.READY]
    seen = [health(role.engines[k]) for k in ready]
    return tuple(None if r.state is ReplicaState.READY else r for r in seen)


def _of_blocked(config: Config, state: State, name: str, role: Role) -> list[Event]:
    lease = state.book.lease(name)
    if lease.state is not LeaseState.BLOCKED or state.anew.gone or has_left(config, state, name):
        return []
    found: list[Event] = []
    asking = role.work is not None and role.work.method == "probe"
    asking = asking or name in state.anew.finding or any(who == name for who, *_ in state.held_back)
    if not asking and not role.doubted:
        found.append(("probe", name))
        if state.faults and not state.held_back:
            found.append(("slow_probe", name))
    if not state.resolving:
        found += [("resolve", name), ("resolve_and_abandon", name)]
        if state.faults and name == "trainer":
            found.append(("resolve_unreachable", name))
    return found


def _of_faults(config: Config, state: State, name: str, role: Role) -> list[Event]:
    found: list[Event] = []
    step = state.step
    if step.wait == "answer" and step.role == name and step.method != "stop" and name != "trainer":
        found.append(("timeout", name))
    if name in state.anew.finding and name != "trainer":
        found.append(("unanswered", name))
    found += [("late", name, *_named(zombie)) for zombie in sorted(role.zombies) if not zombie.done]
    for k, engine in enumerate(role.engines):
        if engine.gpu in (Gpu.ASLEEP, Gpu.PARTIAL, Gpu.FULL):
            found.append(("server_dies", name, str(k)))
        if engine.gpu in (Gpu.PARTIAL, Gpu.FULL):
            found.append(("server_dies", name, str(k), "orphan"))
        if engine.holder == "own":
            found.append(("actor_dies", name, str(k)))
    return found


def _named(zombie: Zombie) -> tuple[str, ...]:
    ends = "ends" if zombie.ends else "within"
    return (zombie.kind, str(zombie.token.counter), str(zombie.replica), ends)
