"""New weights in a real SGLang engine that runs, by each transport, also where it fails."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.weights import SeatAsk, WeightTransport
from relax_infer.engines import expected_digest, host_processes
from relax_infer.engines.host_tensors import Bucket
from relax_infer.machines import ReplicaState
from relax_infer.training.hf_folder import weights_digest
from relax_infer.training.torch_group import TorchGroup
from relax_infer.training.weight_sender import WeightSender
from tests.engines.real_engine import RealEngine, real_engine
from tests.engines.weight_engine import change_rules

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

BUCKET_MB = 0.05
"""Of the 0.2 MB of the checkpoint."""


class Sending(TorchGroup):
    """A real group that may end before its second bucket."""

    dies = False
    sent = 0

    def send(self, bucket: Bucket) -> None:
        if self.dies and self.sent == 1:
            raise RuntimeError("the trainer was killed")
        super().send(bucket)
        type(self).sent += 1


def make_group(ask: SeatAsk, world: int) -> Sending:
    Sending.sent = 0
    return Sending("127.0.0.1", ask.backend, world, ask.timeout, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealEngine]:
    sender = WeightSender("127.0.0.1", make_group)
    async with real_engine(tmp_path_factory.mktemp("weights"), sender) as made:
        yield made


def choose_for(engine: RealEngine, transport: str) -> None:
    settings = {"transport": transport, "bucket_mb": BUCKET_MB, "timeout": 30.0}
    weights = WeightTransport.model_validate(settings)
    engine.spec = engine.spec.model_copy(update={"weights": weights})


@pytest.fixture
def by(engine: RealEngine):
    """Has the engine take its next weights by a transport."""

    def choose(transport: str) -> None:
        choose_for(engine, transport)

    yield choose
    Sending.dies = False
    choose("disk")


async def load(engine: RealEngine, version: int):
    weights = engine.weights(version)
    folder = Path(weights.uri.removeprefix("file://"))
    weights = weights.model_copy(update={"digest": weights_digest(folder)})
    return (await engine.operate("load_weights", weights=weights)).report


def right(engine: RealEngine, version: int) -> tuple[int, str | None]:
    return version, expected_digest(engine.folder / f"version-{version}", "float32")


@pytest.mark.parametrize("transport", ["tensor", "process_group"])
async def test_an_awake_engine_takes_weights_that_are_those_of_the_disk(engine, by, transport):
    await engine.ready(0)
    before = await engine.actor.describe()
    by(transport)
    for version in (1, 0, 1):
        report = await load(engine, version)
        assert (report.state, report.error, report.note) == (ReplicaState.READY, None, None)
        assert (report.weight_version, report.weights_digest) == right(engine, version)
        read = await engine.actor.read_weights()
        assert (read.weight_version, read.weights_digest) == right(engine, version)
    assert (await engine.actor.describe()).incarnation == before.incarnation


async def test_the_real_engine_keeps_the_rules_that_its_double_has(engine):
    await engine.ready(0)
    token = FenceToken(counter=engine.counter, grant_id=f"grant-{engine.counter}")
    await change_rules(await engine.control(), token)
    read = await engine.actor.read_weights()
    assert (read.weight_version, read.weights_digest) == right(engine, 0)


async def test_a_sender_that_dies_in_the_middle_is_replaced_by_the_disk(engine, by):
    await engine.ready(0)
    by("process_group")
    Sending.dies = True
    report = await load(engine, 1)
    assert Sending.sent == 1, "it died after the first bucket"
    assert report.state is ReplicaState.READY
    assert "process_group" in (report.note or "")
    assert (report.weight_version, report.weights_digest) == right(engine, 1)
    Sending.dies = False
    report = await load(engine, 0)
    assert (report.state, report.note) == (ReplicaState.READY, None)
    assert (report.weight_version, report.weights_digest) == right(engine, 0)


@pytest.mark.wide
@pytest.mark.parametrize("transport", ["tensor", "process_group"])
async def test_an_engine_killed_in_the_middle_fails_in_time_and_is_launched_whole(
    engine, by, transport, monkeypatch
):
    await engine.ready(0)
    by(transport)
    control = await engine.control()
    where = await engine.actor.describe()
    name = "update_from_tensors" if transport == "tensor" else "update_from_group"
    called = getattr(type(control), name)
    calls = 0

    async def update(self, *args):
        nonlocal calls
        calls += 1
        if calls == 2:
            for pid in where.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return await called(self, *args)

    monkeypatch.setattr(type(control), name, update)
    report = await load(engine, 1)
    monkeypatch.undo()
    assert calls == 2
    assert report.state is ReplicaState.FAILED
    assert report.weight_version is None, "nobody knows what it held"
    report = await load_again(engine)
    assert [pid for pid in where.pids if host_processes.process(pid) is not None] == []
    assert (report.state, report.note) == (ReplicaState.READY, None)
    assert (report.weight_version, report.weights_digest) == right(engine, 1)


@pytest.mark.wide
async def test_both_ranks_of_an_engine_take_their_parts(tmp_path: Path):
    """What two ranks hold has no digest that is known from the files: it is that of a launch."""
    sender = WeightSender("127.0.0.1", make_group)
    async with real_engine(tmp_path, sender, gpus=2) as two:
        digests: dict[int, str | None] = {}
        for version in (0, 1):
            await two.operate("stop")
            await two.ready(version)
            digests[version] = (await two.actor.read_weights()).weights_digest
        assert digests[0] != digests[1]
        for transport in ("tensor", "process_group"):
            choose_for(two, transport)
            for version in (0, 1):
                report = await load(two, version)
                assert (report.state, report.error, report.note) == (ReplicaState.READY, None, None)
                assert (report.weight_version, report.weights_digest) == (
                    version,
                    digests[version],
                )


async def load_again(engine: RealEngine):
    """As a recovery would: what is left is ended with proof, and the engine launched."""
    return (await engine.operate("onload", 1)).report
