"""The engine for people who run it themselves: refusals without a server, the rest on one."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from relax_infer.contracts.failures import PermanentError
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines import SGLangEngine, host_processes
from tests.engines.checkpoints import make_checkpoint
from tests.engines.test_real_engine import generate


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("RELAX_HOME", str(tmp_path))
        yield


@pytest.mark.usefixtures("short")
async def test_a_static_engine_refuses_other_weights_before_anything_is_sent(tmp_path):
    folder = make_checkpoint(tmp_path / "judge", 0)
    judge = SGLangEngine(folder, name="judge", role="genrm", device="cpu", store=tmp_path)
    with pytest.raises(RuntimeError, match="STATIC"):
        await judge.update_weights_from_disk(WeightsRef(version=1, uri="file:///x", digest=""))
    with pytest.raises(RuntimeError, match="STATIC"):
        await judge.update_weights_from_tensor(WeightsRef(version=1, uri="file:///x", digest=""))
    assert await judge.health_process() is None
    assert judge.get_url() is None
    assert (await judge.shutdown()).proof == "process_gone"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("role", ["genrm", "rollout"])
def test_an_engine_is_not_made_with_flags_that_would_lose_its_weights(tmp_path, role):
    with pytest.raises(ValueError, match="CPU weight backup"):
        SGLangEngine(
            tmp_path,
            name="judge",
            role=role,
            server_args={"enable-weights-cpu-backup": False},
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SGLangEngine]:
    folder = tmp_path_factory.mktemp("alone")
    for version in (0, 1):
        make_checkpoint(folder / f"version-{version}", seed=version)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as short:
        patch.setattr(tempfile, "tempdir", short)
        patch.setenv("RELAX_HOME", str(folder))
        made = SGLangEngine(folder / "version-0", name="mine", device="cpu", store=folder)
        async with made:
            yield made


@pytest.mark.real
@pytest.mark.asyncio(loop_scope="module")
async def test_it_answers_sleeps_with_evidence_takes_weights_and_ends_by_proof(engine):
    url = engine.get_url()
    assert (await generate(url, "one"))[0] == 200
    assert await engine.health_process() is True
    assert await engine.health_generate()
    evidence = await engine.release_memory_occupation()
    assert evidence.proof == "simulated"  # a CPU frees nothing
    assert engine.get_url() is None
    assert (await generate(url, "two"))[0] == 503
    assert not await engine.health_generate()
    url = await engine.resume_memory_occupation()
    first = (await generate(url, "three"))[1]["output_ids"]
    folder = Path(engine.model_path).with_name("version-1")
    weights = WeightsRef(version=1, uri=folder.as_uri(), digest="")
    url = await engine.update_weights_from_disk(weights)
    assert await engine.get_weight_version() == 1
    assert (await generate(url, "four"))[1]["output_ids"] != first
    newer = (await generate(url, "five"))[1]["output_ids"]
    back = WeightsRef(version=2, uri=Path(engine.model_path).as_uri(), digest="")
    url = await engine.update_weights_from_tensor(back)
    assert await engine.get_weight_version() == 2
    assert (await generate(url, "six"))[1]["output_ids"] == first != newer
    assert await engine.abort_requests("nobody") == 0
    missing = WeightsRef(version=9, uri="file:///nowhere/version-9", digest="")
    with pytest.raises(PermanentError, match="version-9"):
        await engine.update_weights_from_disk(missing)
    pids = await engine.pids()
    assert (await engine.shutdown()).proof == "process_gone"
    assert [pid for pid in pids if host_processes.process(pid) is not None] == []
