"""Engines in memory, one state per replica, for :mod:`tests.workflows.scripted_world`.

They keep what real ones keep: the highest fence token, who is resident, which incarnation; and they
die, fail to let go, and hide from a release proof on demand. Every violation of the first promise
is noted, not raised: it is the workflows that are on trial.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from relax_infer.contracts.engines import (
    EngineGroupSpec,
    EngineOperation,
    GroupReport,
    ReplicaReport,
    WatchReport,
    WatchRequest,
)
from relax_infer.contracts.fence import FenceMemory
from relax_infer.contracts.refs import StagedRef
from relax_infer.machines import ReplicaState

STAGED = StagedRef(uri="memory://x", sha256="0" * 64, rows=256)
_HOLDS = frozenset({ReplicaState.READY, ReplicaState.ONLOADING, ReplicaState.FAILED})


class Engine:
    """One replica."""

    def __init__(self) -> None:
        self.state = ReplicaState.DEAD
        self.incarnation = 0
        self.weights: int | None = None
        self.fence = FenceMemory()
        self.error: str | None = None
        self.launches_fail = 0
        """The next so many launches end in death."""
        self.hides = False
        """A process of it may be alive, so that no proof can be had."""
        self.unreachable = False
        """Its host is gone: not even a person's word can be checked there."""

    @property
    def holds(self) -> bool:
        return self.state in _HOLDS

    def die(self, why: str = "its server exited by itself") -> None:
        self.state, self.error = ReplicaState.FAILED, why


class ScriptedEngines:
    """Every engine of a run, and who holds the GPUs beside them."""

    def __init__(self, apart: Iterable[tuple[str, str]] = ()) -> None:
        self._apart = {frozenset(pair) for pair in apart}
        """Roles that share no GPU."""
        self.engines: dict[tuple[str, int], Engine] = defaultdict(Engine)
        self.trainer_holds = False
        self.violations: list[str] = []
        self.log: list[tuple[str, str]] = []
        self.launches: list[tuple[str, int]] = []
        self.stops: list[tuple[str, int]] = []
        self.routes_checked = False
        """Whether a push may name only engines that answer: where none dies by itself."""

    def of(self, role: str) -> list[Engine]:
        return [engine for (r, _), engine in self.engines.items() if r == role]

    def holds(self, role: str, holders: Iterable[str] | None = None) -> bool:
        """Whether one of the named holders does; None: any of the role's."""
        if role == "trainer":
            return self.trainer_holds
        named = None if holders is None else {int(each.rpartition("-")[2]) for each in holders}
        return any(
            engine.holds
            for (r, k), engine in self.engines.items()
            if r == role and (named is None or k in named)
        )

    def take(self, role: str) -> None:
        others = {r for (r, _), engine in self.engines.items() if engine.holds and r != role}
        if self.trainer_holds and role != "trainer":
            others.add("trainer")
        others = {r for r in others if frozenset((r, role)) not in self._apart}
        if others:
            self.violations.append(f"{role} loads while {sorted(others)} hold")
        self.trainer_holds = self.trainer_holds or role == "trainer"

    def answers(self, role: str, *, every: bool = False) -> bool:
        ready = [engine.state is ReplicaState.READY for engine in self.of(role)]
        return all(ready) if every else any(ready)

    def end_all(self) -> None:
        """A person went to the nodes and ended whatever was left."""
        self.trainer_holds = False
        for engine in self.engines.values():
            if engine.holds:
                engine.state, engine.hides = ReplicaState.DEAD, False

    def check_routes(self, urls: Iterable[str]) -> None:
        """Whoever gets an address calls it: its engine answers, and with its siblings' weights."""
        if self.routes_checked:
            known = {_url(k, engine): engine for (_, k), engine in self.engines.items()}
            routed = {url: known.get(url) for url in urls}
            wrong = [u for u, e in routed.items() if e is None or e.state is not ReplicaState.READY]
            if wrong or len({e.weights for e in routed.values() if e is not None}) > 1:
                self.violations.append(f"routed too early or too long: {wrong or routed}")

    # --- operations

    def onload(self, op: EngineOperation, *, opens: bool = True, dies: bool = False) -> GroupReport:
        role = op.group.role
        self.take(role)
        self.log.append((role, "onload"))
        for engine, replica in self._asked(op):
            engine.fence.admit(op.fence)
            if engine.state is ReplicaState.DEAD or engine.incarnation == 0:
                self.launch_one(role, replica, engine)
            elif engine.state is ReplicaState.SLEEPING:
                engine.state = ReplicaState.ONLOADING
            if engine.state is not ReplicaState.FAILED:
                if op.weights is not None:
                    engine.weights = op.weights.version
                if opens:
                    engine.state = ReplicaState.READY
            if dies:
                engine.die("died while it loaded")
        return self.report(op.group, op.targets)

    def launch(self, op: EngineOperation) -> GroupReport:
        self.take(op.group.role)
        for engine, replica in self._asked(op):
            engine.fence.admit(op.fence)
            if engine.state is ReplicaState.FAILED:
                self.violations.append(f"{op.group.role}/{replica} is launched beside the last one")
            self.launch_one(op.group.role, replica, engine)
        return self.report(op.group, op.targets)

    def fail(self, op: EngineOperation, why: str, *, hides: bool = False) -> GroupReport:
        """It looked well, and then it died."""
        for engine, _ in self._asked(op):
            engine.die(why)
            engine.hides = hides
        return self.report(op.group, op.targets)

    def launch_one(self, role: str, replica: int, engine: Engine) -> None:
        self.launches.append((role, replica))
        engine.incarnation += 1
        engine.state, engine.error = ReplicaState.ONLOADING, None
        if engine.launches_fail:
            engine.launches_fail -= 1
            engine.die("Transient: it did not answer within 300 s")

    def offload(self, op: EngineOperation, *, wedged: bool = False) -> GroupReport:
        self.log.append((op.group.role, "offload"))
        for engine, _ in self._asked(op):
            engine.fence.admit(op.fence)
            if wedged:
                engine.die("a request never drained")
            elif engine.state is ReplicaState.FAILED and engine.hides:
                engine.error = "Unconfirmed: a process hides its environment"
            elif engine.state is ReplicaState.DEAD:
                engine.error = None
            else:
                engine.state = ReplicaState.SLEEPING
        return self.report(op.group, op.targets)

    def stop(self, op: EngineOperation) -> GroupReport:
        for engine, replica in self._asked(op):
            engine.fence.admit(op.fence)
            self.stops.append((op.group.role, replica))
            if engine.hides:
                engine.die("Unconfirmed: process 7 (python) hides its environment")
            else:
                engine.state, engine.error = ReplicaState.DEAD, None
        return self.report(op.group, op.targets)

    def forget(self, op: EngineOperation) -> GroupReport:
        for engine, _ in self._asked(op):
            if engine.unreachable:
                engine.die("Unconfirmed: the engine's actor cannot be reached")
            elif engine.hides:
                engine.die("Permanent: process 7 of it lives on this host")
            else:
                engine.state, engine.error = ReplicaState.DEAD, None
        return self.report(op.group, op.targets)

    async def watch(self, request: WatchRequest) -> WatchReport:
        while True:
            report = self.report(request.group, tuple(request.incarnations))
            lost = tuple(
                r
                for r in report.replicas
                if r.state is not ReplicaState.READY
                or r.incarnation != request.incarnations[r.replica]
            )
            if lost:
                return WatchReport(lost=lost)
            await asyncio.sleep(0.05)

    def report(self, group: EngineGroupSpec, replicas: Iterable[int] | None = None) -> GroupReport:
        asked = group.numbers if replicas is None else replicas
        reports = tuple(self._report(group, replica) for replica in asked)
        released = all(r.state in (ReplicaState.SLEEPING, ReplicaState.DEAD) for r in reports)
        return GroupReport(replicas=reports, evidence=STAGED if released else None)

    def _report(self, group: EngineGroupSpec, replica: int) -> ReplicaReport:
        engine = self.engines[group.role, replica]
        return ReplicaReport(
            replica=replica,
            engine_id=group.engine_id(replica),
            state=engine.state,
            base_url=_url(replica, engine),
            incarnation=f"{group.role}-{replica}-{engine.incarnation}",
            weight_version=engine.weights,
            weights_digest=f"d{engine.weights}",
            fence=engine.fence.seen,
            error=engine.error,
        )

    def _asked(self, op: EngineOperation) -> list[tuple[Engine, int]]:
        return [(self.engines[op.group.role, replica], replica) for replica in op.targets]


def _url(replica: int, engine: Engine) -> str:
    return f"http://127.0.0.1:{9000 + 1000 * engine.incarnation + replica}"
