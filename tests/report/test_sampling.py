"""Which samples a report shows."""

from itertools import pairwise
from pathlib import Path

import pytest

from relax_infer.contracts.refs import RunRef
from relax_infer.report.sampling import PER_STEP, STEPS, choose, cut, spread
from relax_infer.samples import StagingStore
from tests.report.records import RUN, some_samples


@pytest.fixture
def store(tmp_path: Path) -> StagingStore:
    return StagingStore(RunRef(run=RUN, store=tmp_path.as_uri()))


def run_of(tmp_path: Path) -> RunRef:
    return RunRef(run=RUN, store=tmp_path.as_uri())


def test_a_small_run_is_shown_whole(store: StagingStore, tmp_path: Path):
    store.write_table("steps/3/scored.arrow", some_samples(3, 3, 4))
    chosen = choose(run_of(tmp_path), [1, 2, 3])
    assert [(r["group"], r["sample"]) for r in chosen.rows] == [
        (g, s) for g in range(3) for s in range(4)
    ]
    assert chosen.rule == "12 of 12 samples."
    row = chosen.rows[1]
    assert (row["step"], row["tokens"], row["weights"], row["reward"]) == (3, 2, 2, 0.0)
    assert (row["log_prob"], row["teacher_kl"]) == (3.0, 0.0)


def test_of_a_large_step_whole_groups_are_shown_worst_best_and_unscored_among_them(
    store: StagingStore, tmp_path: Path
):
    store.write_table("steps/1/scored.arrow", some_samples(1, 500, 4, unscored=250))
    chosen = choose(run_of(tmp_path), [1])
    groups = {row["group"] for row in chosen.rows}
    assert len(chosen.rows) == PER_STEP
    assert len(groups) == PER_STEP / 4
    assert {0, 499, 250} <= groups
    assert any(row["reward"] is None for row in chosen.rows)
    assert choose(run_of(tmp_path), [1]) == chosen


def test_of_many_steps_first_last_and_evenly_spread_ones_are_shown():
    found = spread(range(1, 1001), STEPS)
    assert len(found) == STEPS
    assert (found[0], found[-1]) == (1, 1000)
    assert {b - a for a, b in pairwise(found)} <= {25, 26}
    assert spread([3, 5], STEPS) == [3, 5]


def test_long_texts_keep_beginning_and_end(store: StagingStore, tmp_path: Path):
    assert cut("a" * 80 + "b" * 20, 60) == f"{'a' * 40} […40 characters…] {'b' * 20}"
    for step in range(1, 21):
        store.write_table(f"steps/{step}/scored.arrow", some_samples(step, 6, 4, text="x" * 9000))
    chosen = choose(run_of(tmp_path), range(1, 21))
    assert chosen.clipped is not None
    assert f"cut in the middle after {chosen.clipped} characters" in chosen.rule
    assert all(len(row["response"]) < chosen.clipped + 60 for row in chosen.rows)


def test_steps_without_samples_are_passed_over(tmp_path: Path):
    assert choose(run_of(tmp_path), [1, 2]).rows == []
