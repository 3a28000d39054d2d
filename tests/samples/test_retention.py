"""What is kept of the samples of steps that are trained."""

from pathlib import Path

import pytest

from activities import records
from activities._run_files import store_of
from relax_infer.config import load_recipe
from relax_infer.contracts.refs import RunRef, WeightsRef
from relax_infer.contracts.run import StepRecord, StepResult
from relax_infer.machines import StepPhase


def ended(run: RunRef, step: int, outcome: StepPhase) -> None:
    weights = WeightsRef(version=step, uri="/w", digest="d")
    result = StepResult(step=step, weights=weights)
    record = StepRecord(run=run.run, step=step, outcome=outcome, result=result)
    records._write(run, record)


@pytest.mark.parametrize("keep", [None, 2])
def test_the_newest_trained_steps_keep_their_samples(tmp_path: Path, keep: int | None):
    """A step that gave up is tried again from what it staged: it forgets nothing."""
    run = RunRef(run=f"run-keep-{keep}", store=tmp_path.as_uri())
    store = store_of(run)
    recipe = load_recipe("quickstart", {"staging.keep_steps": keep} if keep else {})
    store.write_json("recipe.json", recipe.model_dump(mode="json"))
    for step in range(1, 5):
        store.write_bytes(f"steps/{step}/scored.arrow", b"rows")
        ended(run, step, StepPhase.FAILED if step == 4 else StepPhase.DONE)
    there = [step for step in range(1, 5) if store.exists(f"steps/{step}/scored.arrow")]
    assert there == ([2, 3, 4] if keep else [1, 2, 3, 4])
    assert all(store.exists(f"steps/{step}/record.json") for step in range(1, 5))
    ended(run, 4, StepPhase.DONE)
    assert store.exists("steps/2/scored.arrow") is (keep is None)
