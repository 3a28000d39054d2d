"""What an engine holds after it slept is what it held before, or it is not opened."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_infer.contracts.engines import RESIDENT_TAGS, EngineOperation
from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines.holder import HolderFiles
from relax_infer.engines.resident import Resident
from relax_infer.engines.seats import Place, TrainerSender
from tests.engines.checkpoints import group_spec

TOKEN = FenceToken(counter=1, grant_id="a")
TAGS = list(RESIDENT_TAGS)


class Control:
    """Of an engine that tells ``digest`` and does what it is asked."""

    socket = Path("s")

    def __init__(self) -> None:
        self.digest = "a" * 64
        self.version: int | None = 3
        self.resumed: list[list[str]] = []
        self.released: list[list[str]] = []

    async def weight_version(self) -> int | None:
        return self.version

    async def weights_digest(self, timeout: float) -> str:
        return self.digest

    async def log_probs(self, tokens: Sequence[int], timeout: float) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    async def resume(self, tags: list[str], token: FenceToken, timeout: float) -> None:
        self.resumed.append(tags)

    async def release(self, tags: list[str], token: FenceToken, timeout: float) -> None:
        self.released.append(tags)

    async def load(self, folder: Path, version: int, token: FenceToken, timeout: float) -> None:
        self.version, self.digest = version, "c" * 64


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Resident, Any, Any]:
    """Version 3, awake on two GPUs, and checked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = group_spec(tmp_path).model_copy(update={"device": "cuda", "gpus_per_replica": 2})
    resident = Resident("policy/replica-0", HolderFiles(spec, 0))
    resident.begin(tmp_path, WeightsRef(version=3, uri=tmp_path.as_uri(), digest=""))
    return resident, Control(), spec


async def sleep_and_wake(resident: Resident, control: Any) -> None:
    await resident.release(control, TOKEN, 1)
    await resident.resume(control, ("weights",), TOKEN, 1)
    await resident.resume(control, RESIDENT_TAGS, TOKEN, 1)


async def test_weights_that_changed_over_sleep_are_refused_with_both_digests(held):
    """On a GPU nobody can say from the files what the digest must be; it must be the old one."""
    resident, control, spec = held
    await resident.check_weights(control, spec)
    await resident.check_canary(control, 1)
    await sleep_and_wake(resident, control)
    await resident.check_weights(control, spec)
    await resident.check_canary(control, 1)
    await sleep_and_wake(resident, control)
    control.digest = "b" * 64
    for _ in range(2):  # the damage does not become the new truth
        with pytest.raises(PermanentError, match="nothing was loaded since") as error:
            await resident.check_weights(control, spec)
        assert "a" * 64 in str(error.value)
        assert "b" * 64 in str(error.value)


async def test_weights_that_changed_before_the_first_canary_are_refused_too(held):
    """A launch reads the digest; the canary comes with the first onload, which may be after it
    slept."""
    resident, control, spec = held
    await resident.check_weights(control, spec)
    await sleep_and_wake(resident, control)
    control.digest = "b" * 64
    with pytest.raises(PermanentError, match="nothing was loaded since"):
        await resident.check_weights(control, spec)


async def test_a_load_makes_another_digest_the_right_one(held, tmp_path: Path):
    resident, control, spec = held
    await resident.check_weights(control, spec)
    weights = WeightsRef(version=4, uri=tmp_path.as_uri(), digest="")
    op = EngineOperation(group=spec, operation_id="op", fence=TOKEN, weights=weights)
    place = Place(spec, 0, op, TrainerSender("nowhere"))
    await resident.load(control, weights, TOKEN, spec, place)
    await resident.check_weights(control, spec)
    assert (resident.version, resident.digest) == (4, "c" * 64)
    await sleep_and_wake(resident, control)
    await resident.check_weights(control, spec)


async def test_an_engine_started_anew_is_not_held_to_the_last_one_s_digest(held, tmp_path: Path):
    resident, control, spec = held
    await resident.check_weights(control, spec)
    resident.forget()
    resident.begin(tmp_path, WeightsRef(version=3, uri=tmp_path.as_uri(), digest=""))
    control.digest = "b" * 64
    await resident.check_weights(control, spec)


async def test_missing_tags_only_are_asked_for_and_never_an_empty_tag_list(held):
    """Contract 7.5. SGLang takes an empty list for every tag, and to resume what is resident kills
    it."""
    resident, control, _ = held
    await resident.resume(control, RESIDENT_TAGS, TOKEN, 1)
    assert control.resumed == [], "everything is resident"
    await resident.release(control, TOKEN, 1)
    await resident.release(control, TOKEN, 1)
    assert control.released == [TAGS], "nothing is left to release"
    await resident.resume(control, (), TOKEN, 1)
    assert control.resumed == []
    await resident.resume(control, ("weights",), TOKEN, 1)
    await resident.resume(control, RESIDENT_TAGS, TOKEN, 1)
    await resident.resume(control, RESIDENT_TAGS, TOKEN, 1)
    assert control.resumed == [["weights"], [tag for tag in TAGS if tag != "weights"]]
    await resident.release(control, TOKEN, 1)
    assert control.released == [TAGS, TAGS]
