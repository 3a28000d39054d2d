"""The trainer group of several ranks, with actors of this process in place of Ray's."""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RaySystemError

import activities.training as activities_module
from relax_infer.contracts.engines import TRAINER_TAGS, BundleBinding, OffloadCheck, ReleaseEvidence
from relax_infer.contracts.failures import (
    PermanentError,
    RelaxError,
    TransientError,
    UnconfirmedError,
)
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.training import (
    TrainerReport,
    TrainerSpec,
    TrainerStatus,
    TrainRequest,
    TrainResult,
)
from relax_infer.engines import check_evidence, read_evidence
from relax_infer.training import group as group_module
from relax_infer.training import watching
from relax_infer.training.group import TrainerGroup, combined, combined_status
from relax_infer.training.others import OtherRankFailed, RankMoved
from relax_infer.training.residence import TrainerFiles
from tests.training.conftest import make_spec, operation

FENCE = FenceToken(counter=1, grant_id="grant")


class Rank:
    """What the group sees of a rank's actor: it answers, fails, or waits for one that failed."""

    def __init__(self, rank: int, ports: Iterator[int]) -> None:
        self.rank, self._ports = rank, ports
        self.joined: str | None = None
        self.resident = False
        self.trouble: Callable[[], Awaitable[None]] | None = None
        self.asked: list[str] = []
        self.doubts: list[str] = []
        self.unreachable: Exception | None = None
        self.frozen = False
        self.beats: Iterator[int] = itertools.repeat(0)

    def __getattr__(self, method: str) -> Any:
        call = getattr(self, f"_{method}")

        class Remote:
            @staticmethod
            def remote(*args: Any) -> Awaitable[Any]:
                return call(*args)

        return Remote()

    async def _ping(self) -> int:
        return self.rank

    async def _pulse(self) -> int:
        if self.frozen:
            await asyncio.Event().wait()
        return next(self.beats)

    async def _meeting(self) -> str | None:
        return self.joined

    async def _propose(self) -> str:
        return f"host:{next(self._ports)}"

    async def _status(self) -> TrainerStatus:
        return TrainerStatus(
            step=1,
            resident=self.resident,
            fence=FENCE,
            actor_pid=self.rank + 1,
            doubt=self.doubts.pop() if self.doubts else None,
        )

    async def _onload(self, op: Any, meeting: str | None) -> TrainerReport:
        self.asked.append("onload")
        self.joined = meeting
        if self.trouble:
            await self.trouble()
        self.resident = True
        return TrainerReport(status=await self._status())

    async def _offload(self, op: Any) -> TrainerReport:
        self.asked.append("offload")
        self.resident = False
        return TrainerReport(status=await self._status(), evidence=(evidence(self.rank),))

    _settle = _offload

    async def _forget(self, op: Any) -> TrainerReport:
        if self.trouble:
            await self.trouble()
        return await self._offload(op)

    async def _train(self, request: Any, meeting: str | None) -> TrainResult:
        self.joined = meeting
        if self.trouble:
            await self.trouble()
        return result(1)


def evidence(rank: int) -> ReleaseEvidence:
    return ReleaseEvidence(
        holder=f"trainer/rank-{rank}", proof="simulated", tags=TRAINER_TAGS, fence=FENCE, at=0.0
    )


def result(step: int) -> TrainResult:
    return TrainResult(
        step=step,
        rows=1,
        loss=0,
        grad_norm=0,
        clip_fraction=0,
        policy_kl=0,
        logprob_gap=0,
        tokens=1,
        seconds=0,
        weights=WeightsRef(version=step, uri="file:///w", digest="d"),
    )


class Group(TrainerGroup):
    """With ranks of this process; one that is ended is made anew when it is asked for."""

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec)
        self.ports = itertools.count(1)
        self.ranks: dict[int, Rank] = {}
        self.ends = 0

    async def _actor(self, rank: int) -> Any:
        made = self.ranks.setdefault(rank, Rank(rank, self.ports))
        if made.unreachable is not None:
            raise made.unreachable
        self._pids[rank] = 70 + rank
        return made

    async def _end(self) -> None:
        self.ends += 1
        self.ranks.clear()
        waiting.set()


waiting = asyncio.Event()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    global waiting
    waiting = asyncio.Event()
    monkeypatch.setattr(group_module, "OTHERS_SECONDS", 0.05)
    monkeypatch.setattr(group_module, "MEETING_SECONDS", 0.05)
    monkeypatch.setattr(group_module, "_POLL", 0.01)
    bundles = tuple(
        BundleBinding(bundle=n, node_id=f"n{n}", node_ip=f"10.0.0.{n}", gpu_id=0) for n in range(3)
    )
    return Group(make_spec(tmp_path, tmp_path, ranks=3, bundles=bundles))


def request(spec: TrainerSpec) -> TrainRequest:
    return TrainRequest(trainer=spec, fence=FENCE, step=1, partition="p", keys=1, digest="d")


async def _waits_for_ever() -> None:
    """For a rank that failed; until it is killed."""
    await waiting.wait()
    raise UnconfirmedError("the actor died")


def raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


async def test_all_ranks_meet_at_one_place_and_report_together(group: Group) -> None:
    report = await group.onload(operation(group.spec, "on"))
    assert report.status.resident
    assert {rank.joined for rank in group.ranks.values()} == {"host:1"}
    await group.train(request(group.spec))
    assert {rank.joined for rank in group.ranks.values()} == {"host:1"}
    off = await group.offload(operation(group.spec, "off"))
    assert [e.holder for e in off.evidence] == [f"trainer/rank-{n}" for n in range(3)]
    assert group.ends == 0


async def test_a_rank_that_is_new_among_others_makes_the_group_anew(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    group.ranks[1] = Rank(1, group.ports)
    await group.train(request(group.spec))
    assert group.ends == 1
    assert {rank.joined for rank in group.ranks.values()} == {"host:2"}


async def test_ranks_that_wait_for_one_that_failed_are_ended(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.trouble = _waits_for_ever
    group.ranks[2].trouble = raising(UnconfirmedError("rank 2 died"))
    with pytest.raises(UnconfirmedError, match="died"):
        await group.train(request(group.spec))
    assert group.ends == 1
    assert (await group.train(request(group.spec))).step == 1


async def test_ranks_meet_once_those_before_them_are_gone(group: Group) -> None:
    (await group._actors())[1].doubts = ["an earlier process lives"] * 3
    await group.onload(operation(group.spec, "on"))
    assert group.ranks[1].doubts == []


async def test_ranks_that_all_left_meet_again_in_new_processes(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.joined = "left host:1"
    await group.train(request(group.spec))
    assert group.ends == 1
    assert {rank.joined for rank in group.ranks.values()} == {"host:2"}


@pytest.mark.parametrize("failing", [0, 2])
async def test_the_error_of_the_rank_that_failed_is_told(group: Group, failing: int) -> None:
    await group.onload(operation(group.spec, "on"))
    stopped: RelaxError = OtherRankFailed("another rank failed")
    for number, rank in group.ranks.items():
        mine = PermanentError("the disk is full") if number == failing else stopped
        rank.trouble = raising(mine)
    with pytest.raises(PermanentError, match="disk is full"):
        await group.train(request(group.spec))
    assert group.ends == 0


async def test_a_group_of_which_only_some_are_resident_is_left_as_it_is(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].resident = False
    report = await group.settle(operation(group.spec, "look"))
    assert (report.status.resident, report.evidence) == (False, ())
    assert report.status.doubt == "of 3 ranks only 0, 2 are resident"
    assert "offload" not in group.ranks[1].asked


async def test_a_group_that_holds_nothing_settles_with_evidence_of_each(group: Group) -> None:
    report = await group.settle(operation(group.spec, "look"))
    assert len(report.evidence) == 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments in place of minutes."""
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(watching, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(watching, "STILL_SECONDS", 0.4)


@pytest.mark.usefixtures("impatient")
async def test_a_rank_that_is_frozen_in_an_update_is_told_and_the_group_is_ended(
    group: Group,
) -> None:
    """Nothing of it fails: its process is stopped, or its node is cut off."""
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.trouble, rank.beats = _waits_for_ever, itertools.count()
    group.ranks[1].frozen = True
    told = r"trainer rank 1 on node 10\.0\.0\.1 \(process 71\) did not answer"
    with pytest.raises(UnconfirmedError, match=told) as raised:
        await asyncio.wait_for(group.train(request(group.spec)), 5)
    for said in ("see on node 10.0.0.1", "ps -o pid,stat,lstart,cmd -p 71", "kill -9 71"):
        assert said in str(raised.value)
    assert group.ends == 1
    assert (await group.train(request(group.spec))).step == 1


@pytest.mark.usefixtures("impatient")
async def test_an_update_that_does_not_get_on_is_told(group: Group) -> None:
    """The actor answers; the thread that computes hangs in a driver or a file system."""
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.trouble, rank.beats = _waits_for_ever, itertools.count()
    group.ranks[2].beats = itertools.repeat(7)
    told = r"trainer rank 2 on node 10\.0\.0\.2 \(process 72\) answers, and has not got on"
    with pytest.raises(UnconfirmedError, match=told):
        await asyncio.wait_for(group.train(request(group.spec)), 5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "hangs"])
async def test_a_lone_rank_that_is_lost_in_an_update_is_ended_too(
    group: Group, frozen: bool
) -> None:
    """Nobody waits for it; left as it is, it would be asked again and again and never answer."""
    group.spec = group.spec.model_copy(update={"ranks": 1})
    await group.onload(operation(group.spec, "on"))
    group.ranks[0].trouble, group.ranks[0].frozen = _waits_for_ever, frozen
    with pytest.raises(UnconfirmedError, match=r"did not answer|has not got on"):
        await asyncio.wait_for(group.train(request(group.spec)), 5)
    assert group.ends == 1
    assert (await group.train(request(group.spec))).step == 1


async def _takes_long() -> None:
    await asyncio.sleep(0.8)


@pytest.mark.usefixtures("impatient")
async def test_an_update_may_take_long_as_long_as_it_gets_on(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.trouble, rank.beats = _takes_long, itertools.count()
    assert (await group.train(request(group.spec))).step == 1
    assert group.ends == 0


@pytest.mark.usefixtures("impatient")
async def test_an_actor_of_an_older_build_only_has_to_answer(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    for rank in group.ranks.values():
        rank.trouble = _takes_long
        rank.__dict__["pulse"] = object()  # it has no such method to call
    assert (await group.train(request(group.spec))).step == 1


GONE = TransientError("Trainer actor trainer.rank-1 did not answer within 90 s.")


async def resolved(group: Group, fence: FenceToken = FENCE) -> RoleResult:
    """What the lease hears after a person's word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activities_module, "TrainerGroup", lambda _: group)
        op = operation(group.spec, "word").model_copy(update={"fence": fence})
        return await activities_module.forget_trainer(op)


@pytest.mark.parametrize("gone", [GONE, TimeoutError(), RaySystemError("Ray is silent")])
async def test_a_word_is_for_the_ranks_that_cannot_be_asked_and_the_others_let_go(
    group: Group, gone: Exception
) -> None:
    """A node burned: the trainer's rank on the other node is resident, and its GPU is granted to
    others next."""
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].unreachable = gone
    report = await group.forget(operation(group.spec, "word"))
    assert report is not None
    assert not any(group.ranks[n].resident for n in (0, 2))
    assert [e.holder for e in report.evidence] == ["trainer/rank-0", "trainer/rank-2"]
    assert report.unreached == (1,)
    for rank in range(3):  # whatever is on its way there under the grant loads nothing
        with pytest.raises(StaleFence):
            TrainerFiles(group.spec, rank).closed.check(FENCE)


async def test_the_lease_judges_by_the_evidence_of_the_ranks_that_were_asked(group: Group) -> None:
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].unreachable = GONE
    result = await resolved(group)
    assert (result.state, result.holders) == ("SLEEPING", ("trainer/rank-0", "trainer/rank-2"))
    assert result.why == "of its ranks these could not be reached: 1"
    (staged,) = result.evidence
    check = OffloadCheck(
        role="trainer", fence=FENCE, evidence=result.evidence, holders=result.holders
    )
    assert check_evidence(check, read_evidence(staged)).holders == 2


async def test_where_no_rank_can_be_asked_the_word_stands_for_all(group: Group) -> None:
    for rank in await group._actors():
        rank.unreachable = GONE
    assert await group.forget(operation(group.spec, "word")) is None
    result = await resolved(group)
    assert (result.state, result.evidence, result.holders) == ("SLEEPING", (), ())
    assert result.why is not None


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (PermanentError("An earlier trainer process, 7, is alive on this host."), PermanentError),
        (StaleFence(FENCE, FenceToken(counter=2, grant_id="later")), PermanentError),
        (UnconfirmedError("the device does not answer"), UnconfirmedError),
    ],
)
async def test_a_rank_that_can_be_asked_and_does_not_let_go_refuses_the_word(
    group: Group, trouble: Exception, kind: type[RelaxError]
) -> None:
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].unreachable = GONE
    group.ranks[2].trouble = raising(trouble)
    told = re.escape(f"trainer rank 2 on node 10.0.0.2 (process 72): {trouble}")
    with pytest.raises(kind, match=told) as raised:
        await group.forget(operation(group.spec, "word"))
    assert not group.ranks[0].resident
    named = "kill -9 72" in str(raised.value)
    assert named == (not isinstance(trouble, PermanentError)), "it is the earlier one that is left"


async def test_a_rank_that_hangs_does_not_keep_a_person_waiting_for_its_answer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its actor answers, and its thread is in an update or in a driver."""
    monkeypatch.setattr(group_module, "FORGET_SECONDS", 0.05)
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].trouble = _waits_for_ever
    asked = group.forget(operation(group.spec, "word"))
    with pytest.raises(UnconfirmedError, match=r"rank 1 .*did not answer within") as raised:
        await asyncio.wait_for(asked, 5)
    assert "kill -9 71" in str(raised.value)
    assert not group.ranks[0].resident


async def test_a_rank_that_came_up_elsewhere_is_one_that_cannot_be_asked(group: Group) -> None:
    """Ray moved its bundle: the actor there cannot tell what is on the GPU that was bound."""
    await group.onload(operation(group.spec, "on"))
    group.ranks[1].trouble = raising(RankMoved("trainer/rank-1 was bound on 10.0.0.1."))
    report = await group.forget(operation(group.spec, "word"))
    assert report is not None
    assert report.unreached == (1,)
    assert [e.holder for e in report.evidence] == ["trainer/rank-0", "trainer/rank-2"]
    with pytest.raises(StaleFence):
        TrainerFiles(group.spec, 1).closed.check(FENCE)


def status(**changes: Any) -> TrainerStatus:
    return TrainerStatus.model_validate(
        {"step": 1, "resident": False, "fence": FENCE, "actor_pid": 1, **changes}
    )


def test_evidence_counts_only_when_every_rank_has_given_it() -> None:
    whole = TrainerReport(status=status(), evidence=(evidence(0),))
    lacking = TrainerReport(status=status())
    assert combined([whole, lacking]).evidence == ()
    assert len(combined([whole, whole]).evidence) == 2


def test_ranks_that_saw_different_tokens_have_none_in_common() -> None:
    later = status(fence=FenceToken(counter=2, grant_id="other"))
    assert combined_status([status(), later]).fence is None
    assert combined_status([status(), status()]).fence == FENCE


def test_the_doubt_of_a_rank_is_the_groups() -> None:
    doubtful = status(doubt="an earlier process lives")
    assert combined_status([status(), doubtful]).doubt == "rank 1: an earlier process lives"
