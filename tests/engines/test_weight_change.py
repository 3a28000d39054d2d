"""Whatever goes wrong on the way, an engine holds weights that were read back, or is not opened."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from relax_infer.contracts.engines import EngineOperation
from relax_infer.contracts.failures import PermanentError, RelaxError, UnconfirmedError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.weights import WeightTransport
from relax_infer.engines import expected_digest, weight_change
from relax_infer.engines.control import CHANGING, EngineControl
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.host_tensors import OtherWeights, cut, host_tensors
from relax_infer.engines.resident import Resident
from relax_infer.engines.seats import Place
from relax_infer.training.hf_folder import weights_digest
from relax_infer.training.weight_sender import WeightSender
from tests.engines.checkpoints import group_spec, make_checkpoint
from tests.engines.fake_engine import TOKEN, fenced_fake
from tests.engines.sglang_routes import CHANGING_PATHS
from tests.engines.weight_engine import FakeGroup, WeightEngine, Wire, change_rules

BUCKET_MB = 0.05
TRANSPORTS = ("tensor", "process_group")
UPDATE = {
    "tensor": "/update_weights_from_tensor",
    "process_group": "/update_weights_from_distributed",
}


class Loading:
    """One fake engine, and what its actor knows of it."""

    def __init__(self, folder: Path, engine: WeightEngine, control: EngineControl) -> None:
        self.folder, self.engine, self.control = folder, engine, control
        self.spec = group_spec(folder)
        self.resident = Resident("policy/replica-0", HolderFiles(self.spec, 0))
        self.resident.begin(folder / "version-0", WeightsRef(version=0, uri="", digest=""))
        self.sender = WeightSender("127.0.0.1", engine.wire.group)
        self.loads = 0

    def by(self, transport: str, timeout: float = 30.0) -> None:
        settings = {"transport": transport, "bucket_mb": BUCKET_MB, "timeout": timeout}
        weights = WeightTransport.model_validate(settings)
        self.spec = self.spec.model_copy(update={"weights": weights})

    async def load(self, digest: str | None = None) -> None:
        """Version 1, and its read-back."""
        self.loads += 1
        folder = self.folder / "version-1"
        weights = WeightsRef(
            version=1,
            uri=folder.as_uri(),
            digest=weights_digest(folder) if digest is None else digest,
        )
        op = EngineOperation(
            group=self.spec, operation_id=f"op-{self.loads}", fence=TOKEN, weights=weights
        )
        place = Place(self.spec, 0, op, self.sender)
        await self.resident.load(self.control, weights, TOKEN, self.spec, place)
        await self.resident.check_weights(self.control, self.spec)

    def holds_version_1(self) -> bool:
        right = expected_digest(self.folder / "version-1", "float32")
        told = (self.resident.version, self.resident.digest)
        return told == (1, right) == (int(self.engine.label), self.engine.digest())


@pytest.fixture
async def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loading]:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    for version in (0, 1):
        make_checkpoint(tmp_path / f"version-{version}", seed=version)
    async with AsyncExitStack() as stack:
        engine = WeightEngine(tmp_path / "version-0")
        fake, _ = await stack.enter_async_context(fenced_fake(tmp_path, engine))
        fake.fence.close()
        yield Loading(tmp_path, engine, EngineControl(fake.socket))


def buckets(folder: Path) -> int:
    return len(cut(host_tensors(folder / "version-1"), int(BUCKET_MB * 1e6)))


@pytest.mark.parametrize("transport", ["disk", *TRANSPORTS])
async def test_every_transport_leaves_the_same_weights(loading: Loading, transport: str):
    loading.by(transport)
    await loading.load()
    assert loading.holds_version_1()
    assert loading.resident.note is None
    used = "/update_weights_from_disk" in loading.engine.calls
    assert used == (transport == "disk")
    if transport != "disk":
        assert loading.engine.calls.count(UPDATE[transport]) == buckets(loading.folder) > 3
        assert loading.engine.labels == [CHANGING, "1"], "no other name on the way"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", ["refuse", "lose_reply", "spoil"])
async def test_a_bucket_that_is_lost_or_spoilt_is_made_good_from_disk(
    loading: Loading, transport: str, fault: str
):
    for which in range(buckets(loading.folder)):
        loading.by(transport)
        loading.engine.faults[UPDATE[transport]] = [*[""] * which, fault]
        loading.resident.begin(
            loading.folder / "version-0", WeightsRef(version=0, uri="", digest="")
        )
        loading.engine.calls.clear()
        await loading.load()
        assert loading.engine.faults[UPDATE[transport]] == []
        assert loading.holds_version_1()
        assert transport in (loading.resident.note or "")
        assert loading.engine.calls.count("/update_weights_from_disk") == 1
    loading.by(transport)
    await loading.load()
    assert (loading.holds_version_1(), loading.resident.note) == (True, None)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/end_weight_update", "/update_weight_version"]
)
@pytest.mark.parametrize("fault", ["refuse", "lose_reply"])
async def test_a_lost_begin_or_end_is_made_good_from_disk(
    loading: Loading, transport: str, path: str, fault: str
):
    loading.by(transport)
    loading.engine.faults[path] = [fault]
    await loading.load()
    assert loading.holds_version_1()
    assert loading.resident.note is not None


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_reply_lost_after_the_last_bucket_is_no_success(loading: Loading, transport: str):
    """Everything may be there; nobody knows, so all of it is loaded again."""
    loading.by(transport)
    last = buckets(loading.folder) - 1
    loading.engine.faults[UPDATE[transport]] = [*[""] * last, "lose_reply"]
    await loading.load()
    assert loading.holds_version_1()
    assert "/update_weights_from_disk" in loading.engine.calls


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("which", [0, 2])
async def test_an_engine_that_falls_silent_holds_unknown_weights(
    loading: Loading, transport: str, which: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weight_change, "_ABANDON_SECONDS", 0.5)
    loading.by(transport, timeout=2.0)
    loading.engine.faults[UPDATE[transport]] = [*[""] * which, "silence"]
    with pytest.raises(UnconfirmedError):
        await loading.load()
    assert loading.engine.label == CHANGING
    await nothing_is_known(loading)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_where_the_disk_fails_too_the_weights_stay_unknown(loading: Loading, transport: str):
    loading.by(transport)
    loading.engine.faults[UPDATE[transport]] = ["", "refuse"]
    loading.engine.faults["/update_weights_from_disk"] = ["refuse"]
    with pytest.raises(PermanentError, match="update_weights_from_disk"):
        await loading.load()
    await nothing_is_known(loading)


async def test_a_disk_load_of_which_nobody_knows_leaves_the_weights_unknown(loading: Loading):
    loading.engine.faults["/update_weights_from_disk"] = ["lose_reply"]
    loading.spec = loading.spec.model_copy(update={"launch_timeout": 0.3})
    with pytest.raises(UnconfirmedError):
        await loading.load()
    await nothing_is_known(loading)


async def nothing_is_known(loading: Loading) -> None:
    resident = loading.resident
    assert (resident.version, resident.digest) == (None, None)
    assert not resident.current(None), "not even what it had is taken for granted"
    with pytest.raises(RelaxError, match="unknown"):
        await resident.check_weights(loading.control, loading.spec)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_folder_that_is_not_what_was_published_is_not_loaded(
    loading: Loading, transport: str
):
    loading.by(transport)
    with pytest.raises(OtherWeights, match="the trainer published"):
        await loading.load(digest="0" * 64)
    assert "/update_weights_from_disk" not in loading.engine.calls
    assert loading.engine.label == CHANGING
    await nothing_is_known(loading)


@pytest.mark.parametrize("dies_at", range(4))
async def test_a_sender_that_dies_is_replaced_by_the_disk(
    loading: Loading, monkeypatch: pytest.MonkeyPatch, dies_at: int
):
    monkeypatch.setattr(FakeGroup, "dies_at", dies_at)
    loading.by("process_group")
    await loading.load()
    assert loading.holds_version_1()
    assert "process_group" in (loading.resident.note or "")


async def test_a_group_is_left_on_every_end_and_never_used_again(loading: Loading):
    wire: Wire = loading.engine.wire
    loading.by("process_group")
    loading.engine.faults[UPDATE["process_group"]] = ["", "refuse"]
    before = len(wire.groups)
    await loading.load()
    await loading.load()
    mine = wire.groups[before:]
    assert len({group.name for group in mine}) == 2
    assert loading.engine.calls.count("/destroy_weights_update_group") == 2
    for group in mine:
        await until_closed(group)


async def until_closed(group: FakeGroup) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not group.closed:
        assert asyncio.get_running_loop().time() < deadline, "the sender keeps its group"
        await asyncio.sleep(0.01)


async def test_a_deadline_ends_a_change_that_goes_on_for_too_long(loading: Loading):
    loading.by("tensor", timeout=1e-9)
    await loading.load()
    assert loading.holds_version_1()
    assert "has not got its weights" in (loading.resident.note or "")


async def test_the_engine_double_keeps_the_rules_of_the_real_one(loading: Loading):
    await change_rules(loading.control, TOKEN)


async def test_every_call_of_a_change_needs_the_fence_token(loading: Loading):
    for transport in TRANSPORTS:
        loading.by(transport)
        await loading.load()
    reads = {"/model_info", "/weights_checker", "/flush_cache"}
    assert set(loading.engine.calls) - reads <= CHANGING_PATHS
