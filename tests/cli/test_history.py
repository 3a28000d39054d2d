"""A step's history in words, from histories of real runs."""

from pathlib import Path

import pytest

from relax_infer.cli._history import Told, read
from relax_infer.machines import StepPhase
from tests.workflows.histories import FOLDER, load


def told(name: str, events: int | None = None) -> Told:
    history = load(Path(FOLDER) / f"{name}.json.gz")
    return read(list(history.events)[:events])


@pytest.mark.parametrize("step", ["step-1", "step-2"])
def test_a_finished_step_has_every_phase_with_its_time(step: str):
    found = told(step)
    phases = found.phases(now=0.0)
    assert [p.phase for p in phases][:3] == [
        StepPhase.PREPARING,
        StepPhase.GENERATING,
        StepPhase.ROLLOUT_OFFLOADING,
    ]
    assert StepPhase.TRAINING in {p.phase for p in phases}
    assert found.ended is not None
    assert sum(p.seconds for p in phases) == pytest.approx(found.ended - found.began, abs=5.0)
    assert found.asked == {}
    assert found.entered[-1][0] is StepPhase.DONE
    assert {a.outcome for a in found.activities} <= {"done", "failed", "timed out"}
    assert {"generate_groups", "train_step"} <= {a.name for a in found.activities}


def test_of_a_step_in_the_middle_it_tells_what_nobody_has_answered_yet():
    whole = load(Path(FOLDER) / "step-1.json.gz").events
    asks, asked = 0, set[str]()
    for count in range(1, len(whole)):
        found = read(list(whole)[:count])
        if found.asked:
            asks += 1
            [(whom, what, since)] = found.asked.values()
            asked.add(whom.rpartition(".")[2])
            assert what
            assert since >= found.began
    assert asks > 10
    assert asked == {"lease", "genrm"}, "also its judge, whose engine was killed: is it ready?"


def test_an_activity_carries_its_summary():
    [generated] = [a for a in told("step-1").activities if a.name == "generate_groups"][:1]
    assert generated.summary == "generate, attempt 1"
    assert generated.ended is not None
