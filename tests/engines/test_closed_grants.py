"""Grants that a person's word ended for an engine that could not be reached."""

import tempfile
from pathlib import Path

import pytest

from relax_infer.contracts.engines import EngineGroupSpec, EngineOperation
from relax_infer.contracts.failures import TransientError
from relax_infer.contracts.fence import FenceToken, StaleFence
from relax_infer.engines import EngineGroup, group
from relax_infer.engines.actor import EngineActor
from relax_infer.engines.closed_grants import ClosedGrants, closed_grants
from relax_infer.machines import ReplicaState

TOKEN = FenceToken(counter=3, grant_id="run:step-1/activate")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineGroupSpec:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return EngineGroupSpec(
        run="run",
        role="genrm",
        model="judge",
        model_path="m",
        weight_source="STATIC",
        replicas=2,
        gpus_per_replica=1,
        offload="memory_saver",
        ray_gpu_fraction=0.1,
        placement_group="pg",
        bundles=(),
        device="cpu",
        store=(tmp_path / "store").as_uri(),
    )


def test_a_grant_is_closed_for_one_replica_until_it_is_opened_again(spec: EngineGroupSpec):
    closed_grants(spec, 1).close(TOKEN)
    with pytest.raises(StaleFence, match="has let go"):
        closed_grants(spec, 1).check(TOKEN)
    closed_grants(spec, 0).check(TOKEN)
    closed_grants(spec, 1).check(TOKEN.model_copy(update={"grant_id": "another"}))
    closed_grants(spec, 1).check(TOKEN.model_copy(update={"counter": 4}))
    for _ in range(2):
        closed_grants(spec, 1).reopen(TOKEN)
    closed_grants(spec, 1).check(TOKEN)


def test_a_closed_grant_ends_all_before_it(spec: EngineGroupSpec):
    """A lease that was begun anew closes under a token of its own what the lost one granted."""
    anew = FenceToken(counter=1_000_000_002, grant_id="run.lost-1.genrm")
    closed_grants(spec, 0).close(anew)
    for over in (TOKEN, anew):
        with pytest.raises(StaleFence, match="has let go"):
            closed_grants(spec, 0).check(over)
    closed_grants(spec, 0).check(anew.model_copy(update={"counter": anew.counter + 1}))


def test_a_store_that_does_not_answer_says_so(tmp_path: Path):
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(TransientError, match="closed-grants"):
        ClosedGrants(str(tmp_path), "run", "engine").close(TOKEN)


@pytest.mark.parametrize("kind", ["launch", "onload", "load_weights"])
async def test_an_engine_loads_nothing_under_a_closed_grant(spec: EngineGroupSpec, kind: str):
    """Its host was cut off when the word was given; what was on its way comes now."""
    closed_grants(spec, 0).close(TOKEN)
    actor = EngineActor(spec, 0)
    op = EngineOperation(group=spec, operation_id="late", fence=TOKEN)
    outcome = await actor.operate(kind, op)  # type: ignore[arg-type]
    assert outcome.stale == TOKEN
    assert outcome.report.state is ReplicaState.DEAD
    assert outcome.report.fence is None


async def test_a_word_for_an_engine_that_nobody_can_ask_leaves_its_grant_closed(
    spec: EngineGroupSpec, monkeypatch: pytest.MonkeyPatch
):
    """Its node is gone for good: no actor answers, and none can be made there."""

    async def silent(*_: object) -> None:
        raise TransientError("its actor did not answer", cure="Is its node up?")

    monkeypatch.setattr(group, "node_actor", silent)
    op = EngineOperation(group=spec, operation_id="word", fence=TOKEN, word="ana: it burned")
    report = await EngineGroup(spec).forget(op.model_copy(update={"replicas": (1,)}))
    [told] = report.replicas
    assert told.state is ReplicaState.FAILED
    assert told.error is not None
    assert told.error.startswith("Unconfirmed: its actor did not answer")
    with pytest.raises(StaleFence):
        closed_grants(spec, 1).check(TOKEN)
    # Of an operation that was asked for, the same silence says that nothing was begun.
    asked = await EngineGroup(spec).offload(op)
    assert all((each.error or "").startswith("Transient") for each in asked.replicas)
