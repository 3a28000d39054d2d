"""What may happen in a state of the model: :func:`events`."""

from relax_infer.machines import (
    GROUP,
    LeaseState,
    ReplicaState,
)
from tests.machines.host import operate
from tests.machines.model import (
    Config,
    Event,
    Role,
    State,
)
from tests.machines.trainer import trainer_operate
from tests.machines.values import Engine, Gpu, Report, Token

FAULTS = frozenset(
    {
        *("request_lost", "reply_lost", "timeout", "late", "slow_probe", "slow_resolve"),
        *("server_dies", "actor_dies", "phase_fails"),
    }
)
"""Events that spend the budget; an answer after a trouble does too."""
TROUBLES = ("launch", "load", "drain", "prove", "keep")


def carried_out(
    role: str, engine: Engine, method: str, token: Token, trouble: str
) -> tuple[Engine, Report]:
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
