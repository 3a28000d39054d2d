"""Engines take their seats, get everything or an error in time, and the group ends on every end."""

import asyncio
import contextlib
import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.training import TrainerSpec
from relax_infer.contracts.weights import SeatAsk
from relax_infer.engines.host_tensors import Bucket, OtherWeights, cut, host_tensors, size_of
from relax_infer.training import torch_group
from relax_infer.training.hf_folder import weights_digest
from relax_infer.training.torch_group import TorchGroup
from relax_infer.training.trainer import TrainerActor
from relax_infer.training.weight_sender import WeightSender
from tests.engines.checkpoints import make_checkpoint

MEMBERS = ("policy/replica-0", "policy/replica-1")


class Group:
    """Rank 0 that sends to nobody."""

    def __init__(self, ask: SeatAsk, world: int) -> None:
        self.name, self.port, self.world = f"g{ask.key}", 7, world
        self.sent = 0
        self.closed, self.aborted = False, ""
        self.goes_on: Callable[[], bool] = lambda: True

    def join(self) -> None:
        deadline = time.monotonic() + 10
        while not self.goes_on():
            if self.aborted:
                raise RuntimeError(self.aborted)
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def send(self, bucket: Bucket) -> None:
        self.sent += size_of(bucket)

    def abort(self, why: str) -> None:
        self.aborted = why

    def close(self) -> None:
        self.closed = True


class Sending:
    def __init__(self, folder: Path) -> None:
        self.folder = make_checkpoint(folder / "w", seed=0)
        self.groups: list[Group] = []
        self.sender = WeightSender("10.0.0.1", self._make)
        self.prepare: Callable[[Group], None] = lambda _: None

    def _make(self, ask: SeatAsk, world: int) -> Group:
        made = Group(ask, world)
        self.prepare(made)
        self.groups.append(made)
        return made

    def ask(self, member: str = MEMBERS[0], **changes: Any) -> SeatAsk:
        document: dict[str, Any] = {
            "key": "op",
            "fence": FenceToken(counter=3, grant_id="g"),
            "weights": WeightsRef(
                version=1, uri=self.folder.as_uri(), digest=weights_digest(self.folder)
            ),
            "member": member,
            "ranks": 2,
            "members": MEMBERS,
            "backend": "gloo",
            "bucket_bytes": 50_000,
            "patience": 30.0,
            "timeout": 30.0,
        }
        return SeatAsk(**document | changes)

    async def leave(self, member: str, error: str | None = None, key: str = "op") -> None:
        await self.sender.leave_seat(key, member, MEMBERS, error)


@pytest.fixture
def sending(tmp_path: Path) -> Sending:
    return Sending(tmp_path)


async def test_all_engines_are_one_group_in_which_each_rank_has_a_number(sending: Sending):
    seats = await asyncio.gather(*(sending.sender.take_seat(sending.ask(m)) for m in MEMBERS))
    (group,) = sending.groups
    assert [seat.rank_offset for seat in seats] == [1, 3]
    assert {(s.host, s.port, s.group, s.world) for s in seats} == {("10.0.0.1", 7, group.name, 5)}
    assert seats[0].buckets == seats[1].buckets
    assert len(seats[0].buckets) > 3
    for member in MEMBERS:
        await sending.leave(member)
    assert group.closed
    assert group.sent == sum(4 * _size(t.shape) for b in seats[0].buckets for t in b)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


async def test_one_that_takes_no_part_is_not_waited_for(sending: Sending):
    asked = asyncio.create_task(sending.sender.take_seat(sending.ask()))
    await asyncio.sleep(0)
    await sending.leave(MEMBERS[1], "it takes no part")
    assert (await asked).world == 3
    await sending.leave(MEMBERS[0])


async def test_one_that_never_comes_is_waited_for_in_patience_only(sending: Sending):
    seat = await sending.sender.take_seat(sending.ask(patience=0.05))
    assert seat.world == 3
    with pytest.raises(UnconfirmedError, match="has no seat"):
        await sending.sender.take_seat(sending.ask(MEMBERS[1]))
    await sending.leave(MEMBERS[0])


async def test_one_that_fails_ends_the_group_for_the_others(sending: Sending):
    sending.prepare = lambda group: setattr(group, "goes_on", lambda: False)
    await asyncio.gather(*(sending.sender.take_seat(sending.ask(m)) for m in MEMBERS))
    await sending.leave(MEMBERS[0], "its engine died")
    with pytest.raises(UnconfirmedError, match="its engine died"):
        await sending.leave(MEMBERS[1])
    assert sending.groups[0].closed


async def test_a_second_attempt_is_another_group(sending: Sending):
    for key in ("op", "op-2"):
        await sending.sender.take_seat(sending.ask(key=key, members=MEMBERS[:1]))
        await sending.sender.leave_seat(key, MEMBERS[0], MEMBERS[:1], None)
    assert len({group.name for group in sending.groups}) == 2
    with pytest.raises(UnconfirmedError):
        await sending.sender.take_seat(sending.ask(members=MEMBERS[:1]))


async def test_other_weights_than_were_published_are_found_before_anybody_is_told_that_all_is_well(
    sending: Sending,
):
    ask = sending.ask(members=MEMBERS[:1])
    lied = ask.weights.model_copy(update={"digest": "0" * 64})
    await sending.sender.take_seat(ask.model_copy(update={"weights": lied}))
    with pytest.raises(OtherWeights):
        await sending.sender.leave_seat("op", MEMBERS[0], MEMBERS[:1], None)
    assert sending.groups[0].closed


async def test_an_earlier_grant_gets_no_seat(sending: Sending):
    await sending.sender.take_seat(sending.ask(members=MEMBERS[:1]))
    stale = FenceToken(counter=2, grant_id="f")
    with pytest.raises(StaleFence):
        await sending.sender.take_seat(sending.ask(key="late", fence=stale))
    await sending.sender.leave_seat("op", MEMBERS[0], MEMBERS[:1], None)


async def test_weights_that_are_not_there_are_refused_to_everybody(sending: Sending):
    nowhere = WeightsRef(version=1, uri="file:///nowhere", digest="")
    asks = [sending.ask(m, weights=nowhere) for m in MEMBERS]
    outcomes = await asyncio.gather(
        *(sending.sender.take_seat(ask) for ask in asks), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [PermanentError] * 2


async def test_nothing_is_confirmed_to_one_to_whom_nothing_was_sent(sending: Sending):
    with pytest.raises(UnconfirmedError, match="Nothing was sent"):
        await sending.leave(MEMBERS[0])


def test_ranks_that_do_not_come_end_a_real_group_in_time(monkeypatch: pytest.MonkeyPatch):
    """pains 8: a rank is gone, and nobody waits in the collective for it for ever."""
    monkeypatch.setattr(torch_group, "JOIN_SECONDS", 0.2)
    group = TorchGroup("127.0.0.1", "gloo", 2, 30.0, 0)
    with pytest.raises(RuntimeError):
        group.join()
    group.close()


def test_a_real_group_has_a_port_and_a_name_of_its_own():
    groups = [TorchGroup("127.0.0.1", "gloo", 2, 30.0, 0) for _ in range(2)]
    assert len({(group.name, group.port) for group in groups}) == 2
    for group in groups:
        group.close()


class Peers:
    """Real ranks in processes of their own."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def join(self, group: TorchGroup, world: int, sizes: list[int], *dies_after: int) -> None:
        """``dies_after``: for each of the ranks from 1 on, before which bucket; -1: never."""
        for rank, dies in enumerate(dies_after, start=1):
            named = [str(group.port), group.name, str(rank), str(world), str(dies)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.training.weight_peer", *named, *map(str, sizes)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )

    def told(self) -> list[tuple[int, str]]:
        """Exit status and last words of each, all of which end."""
        ended = [(process.communicate(timeout=90)[0], process) for process in self.processes]
        return [(process.returncode, text.strip()) for text, process in ended]


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def test_every_rank_of_a_real_group_gets_every_byte(peers: Peers, tmp_path: Path):
    buckets = cut(host_tensors(make_checkpoint(tmp_path / "w", seed=0)), 50_000)
    group = TorchGroup("127.0.0.1", "gloo", 3, 90.0, 0)
    peers.join(group, 3, [size_of(bucket) for bucket in buckets], -1, -1)
    group.join()
    for bucket in buckets:
        group.send(bucket)
    whole = hashlib.sha256(b"".join(bytes(t.data) for bucket in buckets for t in bucket))
    assert peers.told() == [(0, whole.hexdigest())] * 2
    group.close()


def test_a_rank_that_is_killed_keeps_nobody_waiting(peers: Peers, tmp_path: Path):
    """Each of the others ends: with an error, or with what it had got already."""
    buckets = cut(host_tensors(make_checkpoint(tmp_path / "w", seed=0)), 50_000)
    group = TorchGroup("127.0.0.1", "gloo", 3, 90.0, 0)
    peers.join(group, 3, [size_of(bucket) for bucket in buckets], 1, -1)
    group.join()
    with contextlib.suppress(RuntimeError):
        for bucket in buckets:
            group.send(bucket)
    group.close()
    (killed, _), _ = peers.told()
    assert killed == -signal.SIGKILL


async def test_the_trainer_s_actor_seats_an_engine_and_sends(
    spec: TrainerSpec, peers: Peers, sending: Sending, monkeypatch: pytest.MonkeyPatch
):
    """Resident or not: it sends what is in the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(sending.folder.parent))
    actor = TrainerActor(spec, 0)
    made: list[TorchGroup] = []

    class Noted(TorchGroup):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(torch_group, "TorchGroup", Noted)
    ask = sending.ask(members=MEMBERS[:1], ranks=1)
    seat = await actor.take_seat(ask)
    sizes = [sum(4 * _size(t.shape) for t in bucket) for bucket in seat.buckets]
    peers.join(made[0], seat.world, sizes, -1)
    await actor.leave_seat("op", MEMBERS[0], MEMBERS[:1], None)
    ((status, _),) = peers.told()
    assert status == 0
    assert (seat.host, seat.port, seat.group) == ("127.0.0.1", made[0].port, made[0].name)
    await actor.close()
