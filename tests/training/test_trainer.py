"""The trainer's actor without Ray: fences, operation ids, evidence, what an earlier one left."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_infer.contracts.engines import TRAINER_TAGS, BundleBinding, OffloadCheck
from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.training import TrainerSpec, TrainRequest
from relax_infer.engines import check_evidence, host_processes, orphans, place
from relax_infer.engines.host_processes import this_host
from relax_infer.engines.place import Place
from relax_infer.engines.trainer_process import Residence
from relax_infer.training.others import RankMoved
from relax_infer.training.residence import TrainerFiles
from relax_infer.training.trainer import TrainerActor
from relax_infer.transfer import PublishedRows, rows_digest, rows_of_table
from tests.training.conftest import MEGATRON_WARNS, operation
from tests.transfer.tables import scored_table

pytestmark = MEGATRON_WARNS

Make = Callable[[], Awaitable[TrainerActor]]


class Partitions:
    """Stands for TransferQueue: the rows of each step, and how often they were read."""

    def __init__(self) -> None:
        self.reads = 0

    def rows(self, step: int) -> PublishedRows:
        return rows_of_table(scored_table(groups=6, samples=4, seed=step))

    async def read(self, partition: str) -> PublishedRows:
        self.reads += 1
        return self.rows(int(partition.rpartition("_")[2]))

    def request(self, spec: TrainerSpec, step: int, counter: int = 1) -> TrainRequest:
        rows = self.rows(step)
        return TrainRequest(
            trainer=spec,
            fence=FenceToken(counter=counter, grant_id="grant"),
            step=step,
            partition=f"run/train_{step}",
            keys=len(rows),
            digest=rows_digest(rows),
        )


@pytest.fixture
def partitions() -> Partitions:
    return Partitions()


@pytest.fixture
async def actor(
    spec: TrainerSpec, partitions: Partitions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    """Makes the rank's actor, again and again as after the death of the last one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[TrainerActor] = []

    async def make() -> TrainerActor:
        for earlier in made:
            await earlier.close()
        made.append(TrainerActor(spec, 0, partitions.read))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_on_another_host_it_cannot_say_what_an_earlier_one_left(
    actor: Make, spec: TrainerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pains 5, 7: Ray moved the bundle of a lost node; the trainer there may live on."""
    made = await actor()
    elsewhere = Place("10.9.9.9", (0,), this_host())
    monkeypatch.setattr(place, "where_this_is", lambda: elsewhere)
    with pytest.raises(UnconfirmedError, match="proves nothing"):
        await made.status()
    for ask in (made.onload, made.offload, made.settle):
        with pytest.raises(UnconfirmedError, match="proves nothing"):
            await ask(operation(spec, ask.__name__))
    with pytest.raises(RankMoved, match="proves nothing"):  # the word is for what is there
        await made.forget(operation(spec, "word"))
    another = Place("127.0.0.1", (7,), this_host())
    monkeypatch.setattr(place, "where_this_is", lambda: another)
    with pytest.raises(PermanentError, match="bound to GPU 0"):
        await made.onload(operation(spec, "there", counter=2))
    assert (await made.offload(operation(spec, "free", counter=3))).evidence


async def test_making_it_touches_nothing(actor: Make) -> None:
    status = await (await actor()).status()
    assert (status.step, status.resident, status.fence) == (0, False, None)
    assert status.actor_pid == os.getpid()


async def test_it_is_resident_between_onload_and_offload_with_evidence(
    spec: TrainerSpec, actor: Make
) -> None:
    trainer = await actor()
    assert (await trainer.onload(operation(spec, "on"))).status.resident
    report = await trainer.offload(operation(spec, "off"))
    assert not report.status.resident
    (evidence,) = report.evidence
    assert (evidence.proof, evidence.tags) == ("simulated", TRAINER_TAGS)
    check = OffloadCheck(
        role="trainer", fence=evidence.fence, evidence=(), holders=("trainer/rank-0",)
    )
    assert check_evidence(check, report.evidence).holders == 1


async def test_a_stale_token_is_refused_and_changes_nothing(spec: TrainerSpec, actor: Make) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "new", counter=5))
    for late in (operation(spec, "late", 4), operation(spec, "rival", 5, "another grant")):
        with pytest.raises(StaleFence):
            await trainer.offload(late)
        with pytest.raises(StaleFence):
            await trainer.onload(late)
    assert (await trainer.status()).resident


async def test_the_token_is_remembered_by_the_next_actor(spec: TrainerSpec, actor: Make) -> None:
    await (await actor()).onload(operation(spec, "on", counter=5))
    again = await actor()
    assert (await again.status()).fence == FenceToken(counter=5, grant_id="grant")
    with pytest.raises(StaleFence):
        await again.onload(operation(spec, "late", counter=4))


async def test_the_same_operation_joins_or_gets_its_report_whatever_came_after(
    spec: TrainerSpec, actor: Make
) -> None:
    trainer = await actor()
    on = operation(spec, "on", counter=1)
    first, second = await asyncio.gather(trainer.onload(on), trainer.onload(on))
    assert first is second
    await trainer.offload(operation(spec, "off", counter=2))
    assert await trainer.onload(on) is first
    assert not (await trainer.status()).resident


async def test_a_step_is_trained_once_however_often_it_is_asked(
    spec: TrainerSpec, actor: Make, partitions: Partitions
) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    request = partitions.request(spec, 1)
    first, second = await asyncio.gather(trainer.train(request), trainer.train(request))
    assert first is second
    assert not first.repeated
    assert partitions.reads == 1
    later = await trainer.train(request.model_copy(update={"fence": _token(0)}))
    assert later == first.model_copy(update={"repeated": True})
    assert partitions.reads == 1


async def test_its_pulse_tells_that_an_update_gets_on(
    spec: TrainerSpec, actor: Make, partitions: Partitions
) -> None:
    trainer = await actor()
    before = await trainer.pulse()
    await trainer.onload(operation(spec, "on"))
    assert await trainer.pulse() == before
    await trainer.train(partitions.request(spec, 1))
    # Each of its 2 mini-batches, the look before them, and what was written.
    assert await trainer.pulse() >= before + 6


@pytest.mark.parametrize(
    ("counter", "error", "told"),
    [(0, StaleFence, "stale"), (2, PermanentError, "never onloaded under it")],
)
async def test_training_needs_the_grant_it_was_onloaded_under(
    spec: TrainerSpec,
    actor: Make,
    partitions: Partitions,
    counter: int,
    error: type[Exception],
    told: str,
) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    with pytest.raises(error, match=told):
        await trainer.train(partitions.request(spec, 1, counter))
    assert (await trainer.status()).step == 0


async def test_training_needs_to_be_resident(
    spec: TrainerSpec, actor: Make, partitions: Partitions
) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    await trainer.offload(operation(spec, "off"))
    with pytest.raises(PermanentError, match="offloaded"):
        await trainer.train(partitions.request(spec, 1))


@pytest.mark.parametrize("change", [{"keys": 23}, {"digest": "0" * 64}])
async def test_other_rows_than_were_committed_are_refused(
    spec: TrainerSpec, actor: Make, partitions: Partitions, change: dict[str, object]
) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    with pytest.raises(PermanentError, match="was committed with"):
        await trainer.train(partitions.request(spec, 1).model_copy(update=change))
    assert (await trainer.status()).step == 0


async def test_a_trainer_that_died_under_its_grant_comes_back_to_train(
    spec: TrainerSpec, actor: Make, partitions: Partitions
) -> None:
    first = await actor()
    await first.onload(operation(spec, "on"))
    await first.train(partitions.request(spec, 1))
    again = await actor()
    assert not (await again.status()).resident
    result = await again.train(partitions.request(spec, 2))
    assert (result.step, result.repeated) == (2, False)
    assert (await again.status()).resident


async def test_after_the_death_of_its_holder_the_release_is_proved_by_that(
    spec: TrainerSpec, actor: Make
) -> None:
    await (await actor()).onload(operation(spec, "on"))
    (evidence,) = (await (await actor()).offload(operation(spec, "off"))).evidence
    assert evidence.proof == "process_gone"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that lives until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        if process.poll() is None:
            process.communicate(b"\n")


async def test_an_earlier_process_that_lives_leaves_everything_unconfirmed(
    spec: TrainerSpec, actor: Make, sleeper: "subprocess.Popen[bytes]"
) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    files = TrainerFiles(spec, 0)
    mine = files.residence()
    assert mine is not None
    _pretend(files, mine, sleeper.pid)
    again = await actor()
    for ask in (again.onload, again.offload):
        with pytest.raises(UnconfirmedError, match=f"{sleeper.pid} on node .*, is still alive"):
            await ask(operation(spec, ask.__name__, counter=2))
    sleeper.communicate(b"\n")
    (evidence,) = (await again.offload(operation(spec, "off", counter=2))).evidence
    assert evidence.proof == "process_gone"


@pytest.mark.parametrize("shift", [-3600.0, -0.5, 3600.0])
async def test_an_earlier_process_is_known_by_its_ticks_also_where_the_clock_was_set(
    shift: float, spec: TrainerSpec, actor: Make, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """When it was created is counted from the clock of then: an hour off, it seems to be another's
    process, or one of before the last boot."""
    await (await actor()).onload(operation(spec, "on"))
    files = TrainerFiles(spec, 0)
    mine = files.residence()
    assert mine is not None
    started = psutil.Process(sleeper.pid).create_time() + shift
    _pretend(files, mine, sleeper.pid, started=started)
    again = await actor()
    living = f"{sleeper.pid} on node .*, is still alive"
    with pytest.raises(UnconfirmedError, match=living) as raised:
        await again.offload(operation(spec, "off", counter=2))
    assert f"`kill -9 {sleeper.pid}`" in str(raised.value)
    assert (await again.status()).doubt is not None


async def test_what_ran_before_the_last_boot_is_gone_wherever_it_ran(
    spec: TrainerSpec, actor: Make, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """A container over the same `/tmp` after a reboot: another pid namespace, and no doubt."""
    await (await actor()).onload(operation(spec, "on"))
    files = TrainerFiles(spec, 0)
    mine = files.residence()
    assert mine is not None
    _pretend(files, mine, sleeper.pid, pid_namespace="pid:[1]")
    with pytest.raises(UnconfirmedError, match="in another pid namespace") as raised:
        await (await actor()).offload(operation(spec, "off"))
    assert str(files._residence) in str(raised.value)
    assert f"relax-infer resolve {spec.run.run} " in str(raised.value)
    _pretend(files, mine, sleeper.pid, pid_namespace="pid:[1]", boot_id="an earlier boot")
    (evidence,) = (await (await actor()).offload(operation(spec, "off"))).evidence
    assert evidence.proof == "process_gone"


def _pretend(files: TrainerFiles, mine: Residence, pid: int, **changed: object) -> None:
    row = host_processes.process(pid)
    assert row is not None
    started = psutil.Process(pid).create_time()
    what = {"pid": pid, "started": started, "ticks": row.stamp.started, **changed}
    other = mine.model_copy(update=what)
    files._residence.write_text(other.model_dump_json())


async def test_what_failed_is_tried_again_under_the_same_operation_id(
    spec: TrainerSpec, actor: Make, model_folder: Path
) -> None:
    trainer = await actor()
    config = model_folder / "config.json"
    hidden = config.rename(config.with_suffix(".hidden"))
    try:
        with pytest.raises(PermanentError, match="Cannot read the policy's config"):
            await trainer.onload(operation(spec, "on"))
    finally:
        hidden.rename(config)
    assert (await trainer.onload(operation(spec, "on"))).status.resident


async def test_one_that_is_asked_and_holds_nothing_ends_the_token_with_evidence(
    spec: TrainerSpec, actor: Make
) -> None:
    """What was on its way under that token comes too late, also for the actor's successor."""
    trainer = await actor()
    report = await trainer.settle(operation(spec, "look", counter=3))
    assert [each.proof for each in report.evidence] == ["process_gone"]
    for late in (trainer, await actor()):
        with pytest.raises(StaleFence, match="has let go"):
            await late.onload(operation(spec, "on", counter=3))
    assert (await late.onload(operation(spec, "next", counter=4))).status.resident


async def test_one_that_is_asked_and_is_resident_stays_so(spec: TrainerSpec, actor: Make) -> None:
    trainer = await actor()
    await trainer.onload(operation(spec, "on"))
    report = await trainer.settle(operation(spec, "look"))
    assert (report.status.resident, report.evidence) == (True, ())


async def test_a_late_update_does_not_load_what_was_proved_asleep(
    spec: TrainerSpec, actor: Make, partitions: Partitions
) -> None:
    await (await actor()).onload(operation(spec, "on"))
    again = await actor()
    await again.settle(operation(spec, "look"))
    with pytest.raises((StaleFence, PermanentError)):
        await again.train(partitions.request(spec, 1))
    assert not (await again.status()).resident


async def test_a_word_is_refused_while_an_earlier_process_is_seen(
    spec: TrainerSpec, actor: Make, sleeper: "subprocess.Popen[bytes]"
) -> None:
    await (await actor()).onload(operation(spec, "on"))
    files = TrainerFiles(spec, 0)
    mine = files.residence()
    assert mine is not None
    _pretend(files, mine, sleeper.pid)
    again = await actor()
    with pytest.raises(PermanentError, match=f"{sleeper.pid} on node .*, is alive on this host"):
        await again.forget(operation(spec, "word"))
    sleeper.communicate(b"\n")
    assert (await again.forget(operation(spec, "word"))).evidence


async def test_a_word_stands_for_what_cannot_be_seen(spec: TrainerSpec, actor: Make) -> None:
    await (await actor()).onload(operation(spec, "on"))
    files = TrainerFiles(spec, 0)
    mine = files.residence()
    assert mine is not None
    elsewhere = mine.model_copy(update={"pid_namespace": "pid:[1]"})
    files._residence.write_text(elsewhere.model_dump_json())
    again = await actor()
    with pytest.raises(UnconfirmedError, match="another pid namespace"):
        await again.offload(operation(spec, "off"))
    assert (await again.forget(operation(spec, "word"))).evidence
    with pytest.raises(StaleFence):
        await again.onload(operation(spec, "late"))


async def test_a_grant_that_was_closed_in_the_store_loads_nothing(
    spec: TrainerSpec, actor: Make
) -> None:
    """Its host was cut off when a person said that nothing is left there."""
    trainer = await actor()
    cut_off = operation(spec, "on", counter=3)
    TrainerFiles(spec, 0).closed.close(cut_off.fence)
    with pytest.raises(StaleFence):
        await trainer.onload(cut_off)
    assert (await trainer.onload(operation(spec, "next", counter=4))).status.resident


async def test_it_loads_nothing_beside_a_trainer_of_another_run(
    spec: TrainerSpec,
    actor: Make,
    sleeper: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray lent its GPU to another run while a node was away; what that run's trainer wrote down
    names the device."""
    monkeypatch.setattr(orphans, "DYING_SECONDS", 0.0)
    bound = BundleBinding(bundle=0, node_id="n", node_ip="127.0.0.1", gpu_id=0)
    spec = spec.model_copy(update={"bundles": (bound,)})
    other = spec.model_copy(update={"run": RunRef(run="other", store=spec.run.store)})
    files = TrainerFiles(other, 0)
    files.write_residence(_token(1))
    mine = files.residence()
    assert mine is not None
    assert (mine.run, mine.holder, mine.devices) == ("other", "trainer/rank-0", ("n/0",))
    _pretend(files, mine, sleeper.pid)
    trainer = TrainerActor(spec, 0)
    with pytest.raises(UnconfirmedError, match="trainer/rank-0 is not started beside another"):
        await trainer.onload(operation(spec, "on"))
    assert not (await trainer.status()).resident
    assert TrainerFiles(spec, 0).residence() is None, "it touched nothing"
    sleeper.communicate(b"\n")
    assert (await trainer.onload(operation(spec, "again"))).status.resident
    await trainer.close()


def _token(counter: int) -> FenceToken:
    return FenceToken(counter=counter, grant_id="grant")


async def test_ranks_meet_where_rank_0_serves_and_nowhere_else(
    spec: TrainerSpec, actor: Make
) -> None:
    trainer = await actor()
    assert await trainer.meeting() is None
    place = await trainer.propose()
    assert await trainer.propose() == place
    await trainer.onload(operation(spec, "on"), place)
    assert await trainer.meeting() == place
    with pytest.raises(UnconfirmedError, match=f"met others at {place}"):
        await trainer.onload(operation(spec, "again", counter=2), "127.0.0.1:1")


async def test_after_a_start_that_failed_the_ranks_meet_elsewhere(
    spec: TrainerSpec, actor: Make, model_folder: Path
) -> None:
    trainer = await actor()
    place = await trainer.propose()
    config = model_folder / "config.json"
    hidden = config.rename(config.with_suffix(".hidden"))
    try:
        with pytest.raises(PermanentError, match="Cannot read the policy's config"):
            await trainer.onload(operation(spec, "on"), place)
    finally:
        hidden.rename(config)
    assert await trainer.meeting() is None
    other = await trainer.propose()
    assert other != place
    assert (await trainer.onload(operation(spec, "on"), other)).status.resident


async def test_a_rank_whose_update_broke_in_the_middle_meets_nobody_again(
    spec: TrainerSpec, actor: Make, partitions: Partitions, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await actor()
    place = await trainer.propose()
    await trainer.onload(operation(spec, "on"), place)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(trainer._policy, "train", broken)
    with pytest.raises(RuntimeError, match="closed by peer"):
        await trainer.train(partitions.request(spec, 1), place)
    assert await trainer.meeting() == f"left {place}"
    with pytest.raises(UnconfirmedError, match="met others"):
        await trainer.train(partitions.request(spec, 1), place)
