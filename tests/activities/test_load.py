"""A look at the load of a model's engines."""

from pathlib import Path
from typing import Any

import pytest

from activities import load
from relax_infer.contracts.autoscale import LoadAsk
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import StepRecord
from relax_infer.machines import StepPhase
from relax_infer.samples import StagingStore, layout
from tests.workflows.scripted_world import plan


def write(run: RunRef, step: int, **seconds: float) -> None:
    phases = [{"phase": phase, "started": 1.0, "seconds": took} for phase, took in seconds.items()]
    weights = {"version": 0, "uri": "u", "digest": "d"}
    result = {"step": step, "weights": weights, "phases": phases}
    document = {"run": run.run, "step": step, "outcome": "DONE", "result": result}
    record = StepRecord.model_validate(document)
    StagingStore(run).write_json(layout.record(step), record.model_dump(mode="json"))


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    return RunRef(run="run-1", store=tmp_path.as_uri())


def test_the_newest_record_that_has_the_phase_says_how_long_a_batch_takes(run: RunRef):
    assert load.last_batch(run, StepPhase.GENERATING) == (None, None)
    write(run, 1, GENERATING=9.0)
    write(run, 2, GENERATING=4.0, GENRM_SCORING=3.0)
    write(run, 3, TRAINING=5.0)
    StagingStore(run).write_json("steps/4/generated/attempt-1.json", {})
    assert load.last_batch(run, StepPhase.GENERATING) == (2, 4.0)
    assert load.last_batch(run, StepPhase.GENRM_SCORING) == (2, 3.0)
    assert load.last_batch(run, StepPhase.TEACHER_SCORING) == (None, None)


async def test_a_look_is_the_mean_over_its_time_of_all_replicas(
    run: RunRef, monkeypatch: pytest.MonkeyPatch
):
    seen = [(8, 4), (6, 2), (4, 0, 1)]

    class Engines:
        def __init__(self, spec: Any) -> None: ...

        async def in_flight(self) -> tuple[int, ...]:
            return seen.pop(0) if len(seen) > 1 else seen[0]

    monkeypatch.setattr(load, "EngineGroup", Engines)
    monkeypatch.setattr(load, "_PAUSE", 0.0)
    write(run, 2, GENERATING=4.0)
    group = plan("run-1").groups[0]
    report = await load.look_at_load(LoadAsk(run=run, group=group, seconds=0.0))
    assert (report.in_flight, report.replicas) == (12.0, 2)
    assert (report.step, report.batch_seconds) == (2, 4.0)
    seen[:] = [(8, 4), (6, 2), (4, 0, 0)]
    clock = iter([0.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(load, "_clock", lambda: next(clock))
    report = await load.look_at_load(LoadAsk(run=run, group=group, seconds=5.0))
    assert (report.in_flight, report.replicas) == (8.0, 3)
