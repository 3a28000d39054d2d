"""The replica table of an engine group, without Temporal: who is up, asleep, lost or given up.

Every change is an event of the tables of :mod:`relax_infer.machines`; an illegal one raises and
changes nothing.
"""

from collections.abc import Iterable
from typing import Any

from relax_infer.contracts.engines import (
    AddedReplica,
    EngineGroupSpec,
    GroupReport,
    GroupSnapshot,
    ReplicaReport,
)
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.contracts.recovery import RecoveryResult
from relax_infer.contracts.scale import OutsiderRecord
from relax_infer.machines import (
    GROUP,
    REPLICA,
    GroupEvent,
    GroupState,
    RecoveryState,
    ReplicaEvent,
    ReplicaState,
)
from workflows._outsiders import Outsiders

_ASLEEP = (ReplicaState.SLEEPING, ReplicaState.DEAD)


class GroupBook:
    """What is known of every replica of one group."""

    def __init__(self, spec: EngineGroupSpec) -> None:
        self.spec = spec
        self.state: GroupState = GROUP.initial
        self.replicas: dict[int, ReplicaReport] = {}
        """By replica; a group that was never launched has none."""
        self.generations = [0] * spec.replicas
        self.given_up: dict[int, str] = {}
        """Replicas that are not launched any more, and why. Their GPUs are free."""
        self.out_of_reach: set[int] = set()
        """Those of them that are gone on a person's word alone: their hosts did not answer."""
        self.fence = FenceMemory()
        self.outsiders = Outsiders(spec.replicas)
        self.in_use = False
        """Whether the role has confirmed an onload and nobody asked it to let go since."""

    # --- what is

    @property
    def usable(self) -> tuple[int, ...]:
        """Replicas to operate on. When all were given up, none is: each has another chance."""
        every = self.spec.numbers
        return tuple(k for k in every if k not in self.given_up) or every

    @property
    def askable(self) -> tuple[int, ...]:
        """Replicas that let go with the group, those given up too: a launch may have come late."""
        return tuple(k for k in self.spec.numbers if k not in self.out_of_reach)

    @property
    def failed(self) -> tuple[int, ...]:
        return self._in(ReplicaState.FAILED)

    @property
    def ready(self) -> tuple[int, ...]:
        return self._in(ReplicaState.READY)

    @property
    def dead(self) -> tuple[int, ...]:
        """Proved gone and not given up: the next onload launches them."""
        return tuple(k for k in self._in(ReplicaState.DEAD) if k not in self.given_up)

    @property
    def holding(self) -> tuple[int, ...]:
        """Replicas that may hold GPUs."""
        return tuple(k for k, r in self.replicas.items() if REPLICA.holds(r.state))

    @property
    def holds_nothing(self) -> bool:
        return not GROUP.holds(self.state)

    def telling(self, report: GroupReport) -> tuple[ReplicaReport, ...]:
        """What of a probe tells where the group stands: one that was given up, only if it lives."""
        return tuple(
            r
            for r in report.replicas
            if r.replica in self.spec.numbers
            and (
                r.replica not in self.given_up
                or (r.state is not ReplicaState.DEAD and r.replica not in self.out_of_reach)
            )
        )

    def incarnations(self) -> dict[int, str]:
        """Of the replicas that are READY."""
        reports = (self.replicas[k] for k in self.ready)
        return {r.replica: r.incarnation for r in reports if r.incarnation is not None}

    def errors(self) -> str:
        told = [f"{r.engine_id}: {r.error}" for r in self.replicas.values() if r.error]
        told += [f"{self.spec.engine_id(k)}: given up, {why}" for k, why in self.given_up.items()]
        return "; ".join(told) or "no reason was given"

    def snapshot(self) -> GroupSnapshot:
        versions = {self.replicas[k].weight_version for k in self.ready or self.replicas}
        gone = {r.replica: r.report for r in self.outsiders.all if r.report is not None}
        shown = {**self.replicas, **gone}
        numbers = sorted(shown) or range(len(self.generations))
        return GroupSnapshot(
            role=self.spec.role,
            model=self.spec.model,
            state=self.state,
            weight_source=self.spec.weight_source,
            weight_version=versions.pop() if len(versions) == 1 else None,
            replicas=tuple(shown[k] for k in sorted(shown)),
            generations=tuple(self._generation(k) for k in numbers),
            leaving=tuple(sorted(gone)),
        )

    # --- what happens

    def move(self, event: GroupEvent) -> None:
        self.state = GROUP.advance(self.state, event)

    def begin_onload(self) -> bool:
        """Replicas that are gone are launched again, others wake; True at the first launch."""
        launching = self.state is GroupState.STOPPED
        self.move(GroupEvent.LAUNCH_STARTED if launching else GroupEvent.ONLOAD_STARTED)
        self.give_another_chance(self.usable)
        for replica in self.usable:
            known = self.replicas.get(replica)
            if known is None or known.state is ReplicaState.DEAD:
                self.replicas[replica] = self._fresh(replica)
                self.outsiders.urls.pop(replica, None)
            else:
                self._advance(replica, ReplicaEvent.ONLOAD_STARTED)
        return launching

    def begin_update(self) -> None:
        """Those that answer take other weights, and answer nobody meanwhile."""
        self.move(GroupEvent.WEIGHTS_UPDATE_STARTED)
        self._each(ReplicaEvent.WEIGHTS_UPDATE_STARTED, self.ready)

    def settle_onload(self, report: GroupReport) -> None:
        for fresh in report.replicas:
            up = fresh.state is ReplicaState.READY
            starting = self.replicas[fresh.replica].state is ReplicaState.STARTING
            if up and starting:
                self._advance(fresh.replica, ReplicaEvent.LAUNCHED)
            if up:
                self._opened(fresh)
            else:
                failed = ReplicaEvent.LAUNCH_FAILED if starting else ReplicaEvent.ONLOAD_FAILED
                self._advance(fresh.replica, failed, fresh)

    def begin_drain(self, replicas: Iterable[int]) -> None:
        """They drain from now on; one whose launch is in doubt counts as failed."""
        for replica in tuple(replicas):
            state = self.replicas[replica].state
            if state is ReplicaState.STARTING:
                self._advance(replica, ReplicaEvent.LAUNCH_FAILED)
            elif state is not ReplicaState.FAILED and state is not ReplicaState.DRAINING:
                self._advance(replica, ReplicaEvent.DRAIN_STARTED)

    def settle_drain(self, report: GroupReport) -> None:
        for fresh in report.replicas:
            if self.replicas[fresh.replica].state is ReplicaState.DRAINING:
                asleep = fresh.state is ReplicaState.SLEEPING
                event = ReplicaEvent.RELEASE_CONFIRMED if asleep else ReplicaEvent.DRAIN_FAILED
                self._advance(fresh.replica, event, fresh)
            elif not has_let_go(fresh):
                self.lose(fresh)

    def begin_stop(self) -> None:
        """A stop whose answer was lost, or that reached only some, goes on where it was."""
        if self.state is not GroupState.STOPPING:
            self.move(GroupEvent.STOP_STARTED)
        over = (ReplicaState.DEAD, ReplicaState.STOPPING)
        alive = [k for k, r in self.replicas.items() if r.state not in over]
        self._each(ReplicaEvent.STOP_STARTED, alive)

    def settle_stop(self, report: GroupReport) -> None:
        for fresh in report.replicas:
            if self.replicas[fresh.replica].state is ReplicaState.STOPPING:
                gone = fresh.state is ReplicaState.DEAD and has_let_go(fresh)
                event = ReplicaEvent.RELEASE_PROVED if gone else ReplicaEvent.STOP_UNCONFIRMED
                self._advance(fresh.replica, event, fresh)
            elif fresh.state is not ReplicaState.DEAD or not has_let_go(fresh):
                self.lose(fresh)

    def let_go(self, report: GroupReport) -> bool:
        """Whether every replica says, asked once more, that it holds nothing; then so does the
        group."""
        if not all(has_let_go(fresh) for fresh in report.replicas):
            return False
        if self.state is GroupState.BLOCKED:
            gone = all(r.state is ReplicaState.DEAD for r in report.replicas)
            self.move(GroupEvent.RELEASE_PROVED if gone else GroupEvent.SLEEP_PROVED)
        for fresh in report.replicas:
            if fresh.replica in self.replicas:
                self.replicas[fresh.replica] = fresh
        return True

    def give_another_chance(self, replicas: Iterable[int]) -> None:
        """They are launched again when the group is."""
        for replica in replicas:
            self.given_up.pop(replica, None)
            self.out_of_reach.discard(replica)

    def lose(self, report: ReplicaReport) -> None:
        """A replica died, or nobody knows what became of it. One that was proved gone, and is not,
        came back by a launch that nobody waited for."""
        known = self.replicas.get(report.replica)
        if known is None or known.state is ReplicaState.DEAD:
            self.replicas[report.replica] = self._fresh(report.replica)
        if REPLICA.allows(self.replicas[report.replica].state, ReplicaEvent.DEATH_NOTICED):
            self._advance(report.replica, ReplicaEvent.DEATH_NOTICED, report)

    def unknown(self, replica: int, why: str) -> ReplicaReport:
        """In the place of an answer."""
        failed = {"state": ReplicaState.FAILED, "error": why}
        return self._fresh(replica).model_copy(update=failed)

    def prove(self, event: GroupEvent, seen: Iterable[ReplicaReport]) -> None:
        """A probe proved where every replica stands; it is believed as a whole."""
        self.move(event)
        if event is not GroupEvent.READY_PROVED:
            self.fence.end()
        for fresh in seen:
            self.replicas[fresh.replica] = fresh

    def follow(self, replica: int, state: RecoveryState) -> None:
        """What a recovery does to its replica, while it goes on."""
        now = self.replicas[replica].state
        match state:
            case RecoveryState.STOPPING if now is ReplicaState.FAILED:
                self._advance(replica, ReplicaEvent.STOP_STARTED)
            case RecoveryState.STOPPING if now is ReplicaState.DEAD:
                # Stopped once more before it is launched: until that is proved it is in doubt.
                self.replicas[replica] = self._fresh(replica)
                self._advance(replica, ReplicaEvent.STOP_STARTED)
            case RecoveryState.BLOCKED if now is ReplicaState.STOPPING:
                self._advance(replica, ReplicaEvent.STOP_UNCONFIRMED)
            case RecoveryState.REBUILDING:
                self._gone(replica)
                self.outsiders.urls.pop(replica, None)
                self.replicas[replica] = self._fresh(replica)
            case RecoveryState.SYNCING if now is ReplicaState.STARTING:
                self._advance(replica, ReplicaEvent.LAUNCHED)
            case RecoveryState.FENCED if now is ReplicaState.STARTING:
                self._advance(replica, ReplicaEvent.LAUNCH_FAILED)
            case RecoveryState.FENCED if now is ReplicaState.ONLOADING:
                self._advance(replica, ReplicaEvent.ONLOAD_FAILED)
            case _:
                pass

    def forsaken(self, replica: int, why: str) -> None:
        """Nobody carries its recovery on: it is in doubt again, wherever that left it."""
        state = self.replicas[replica].state
        if state is ReplicaState.STOPPING:
            self._advance(replica, ReplicaEvent.STOP_UNCONFIRMED, self.unknown(replica, why))
        elif REPLICA.allows(state, ReplicaEvent.DEATH_NOTICED):
            self._advance(replica, ReplicaEvent.DEATH_NOTICED, self.unknown(replica, why))

    def recovered(self, result: RecoveryResult) -> None:
        """How a recovery ended."""
        replica = result.replica
        if result.state is RecoveryState.READMITTED:
            assert result.report is not None
            self._opened(result.report)
            return
        self._gone(replica, by_word=result.resolved_by is not None)
        if result.why is not None:
            self.given_up[replica] = result.why

    # --- more and fewer

    def adopt(self, placement: AddedReplica, report: ReplicaReport) -> None:
        """A replica that was made outside of the group is right and answers."""
        replica = placement.replica
        self.spec = self.spec.with_added(placement)
        self.outsiders.forget(replica)
        self.generations += [0] * (replica + 1 - len(self.generations))
        self.replicas[replica] = self._fresh(replica)
        self._advance(replica, ReplicaEvent.LAUNCHED)
        self._opened(report)

    def leave(self, replica: int, operation: str) -> None:
        """The group does not operate on an added replica any more; what runs of it goes on."""
        report = self.replicas.pop(replica)
        self.outsiders.put(
            OutsiderRecord(
                replica=replica,
                stage="leaving",
                operation=operation,
                placement=self.spec.placement_of(replica),
                report=report,
                url=self.outsiders.urls.get(replica),
                drained=report.state is not ReplicaState.READY,
                stopped=replica in self.out_of_reach,
                why=self.given_up.pop(replica, None),
            )
        )
        self.out_of_reach.discard(replica)
        self.spec = self.spec.without(replica)

    def stay(self, replica: int) -> None:
        """One that was to leave is the group's again, as it was."""
        record = self.outsiders[replica]
        assert record.placement is not None
        assert record.report is not None
        self.outsiders.forget(replica)
        self.spec = self.spec.with_added(record.placement)
        self.replicas[replica] = record.report
        if record.why is not None:
            self.given_up[replica] = record.why
        if record.stopped:
            self.out_of_reach.add(replica)

    # --- continue-as-new

    def carry(self) -> dict[str, Any]:
        seen = self.fence.seen
        return {
            "state": self.state,
            "replicas": [r.model_dump(mode="json") for r in self.replicas.values()],
            "generations": self.generations,
            "given_up": [[k, why] for k, why in self.given_up.items()],
            "out_of_reach": sorted(self.out_of_reach),
            "added": [each.model_dump(mode="json") for each in self.spec.added],
            "outsiders": self.outsiders.carry(),
            "fence": seen.model_dump(mode="json") if seen else None,
            "fence_ended": self.fence.ended,
        }

    @classmethod
    def restore(cls, spec: EngineGroupSpec, carried: dict[str, Any]) -> "GroupBook":
        added = [AddedReplica.model_validate(each) for each in carried.get("added", [])]
        book = cls(spec.with_added(*added))
        book.outsiders = Outsiders(spec.replicas, carried.get("outsiders"))
        book.state = GroupState(carried["state"])
        reports = [ReplicaReport.model_validate(each) for each in carried["replicas"]]
        book.replicas = {report.replica: report for report in reports}
        book.generations = list(carried["generations"])
        book.given_up = dict(carried["given_up"])
        book.out_of_reach = set(carried.get("out_of_reach", []))
        fence = carried["fence"]
        seen = FenceToken.model_validate(fence) if fence else None
        book.fence = FenceMemory(seen, ended=carried["fence_ended"])
        return book

    # --- pieces

    def _in(self, state: ReplicaState) -> tuple[int, ...]:
        return tuple(k for k in sorted(self.replicas) if self.replicas[k].state is state)

    def _generation(self, replica: int) -> int:
        """0: it never answered."""
        return self.generations[replica] if replica < len(self.generations) else 0

    def _fresh(self, replica: int) -> ReplicaReport:
        return ReplicaReport(
            replica=replica, engine_id=self.spec.engine_id(replica), state=REPLICA.initial
        )

    def _each(self, event: ReplicaEvent, replicas: Iterable[int]) -> None:
        for replica in tuple(replicas):
            self._advance(replica, event)

    def _advance(
        self, replica: int, event: ReplicaEvent, fresh: ReplicaReport | None = None
    ) -> None:
        """Apply one event; an address stands only while the replica is READY."""
        known = self.replicas[replica]
        state = REPLICA.advance(known.state, event)
        changes: dict[str, Any] = {"state": state}
        if state is not ReplicaState.READY:
            changes["base_url"] = None
        self.replicas[replica] = (fresh or known).model_copy(update=changes)

    def _opened(self, fresh: ReplicaReport) -> None:
        """READY; another incarnation than the last one is a new generation."""
        another = self.replicas[fresh.replica].incarnation != fresh.incarnation
        self._advance(fresh.replica, ReplicaEvent.OPENED, fresh)
        self.generations[fresh.replica] += another
        if fresh.replica >= self.spec.replicas and fresh.base_url is not None:
            self.outsiders.urls[fresh.replica] = fresh.base_url

    def _gone(self, replica: int, *, by_word: bool = False) -> None:
        state = self.replicas[replica].state
        if state is ReplicaState.DEAD:
            return
        proved = ReplicaEvent.RESOLVED_BY_OPERATOR if by_word else ReplicaEvent.RELEASE_PROVED
        self._advance(replica, proved)


def has_let_go(report: ReplicaReport) -> bool:
    """Whether a replica that was asked to let go says that it did."""
    return report.state in _ASLEEP and report.error is None
