"""The judge of the chaos tests: who held GPUs when, from lines as actors write them."""

import json
from pathlib import Path

import pytest

from tests.chaos.held import Span, nobody_held_beside_another, spans_of

POLICY, JUDGE = (
    "engine.rollout.policy.replica-0.actor.log",
    "engine.genrm.judge.replica-0.actor.log",
)


def write(home: Path, name: str, *lines: tuple[int, str]) -> None:
    path = home / "logs" / "run-1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (json.dumps({"time": f"2026-01-01T00:00:{at:02}Z", "event": e}) for at, e in lines)
    path.write_text("\n".join(("a line of Ray", *texts, '{"time": "2026-')))


def seconds(spans: list[Span]) -> list[tuple[str, float, float]]:
    first = spans[0].began
    return [(span.role, span.began - first, span.ended - first) for span in spans]


def test_a_holder_has_its_gpus_from_the_first_load_to_the_proof_that_it_let_go(tmp_path: Path):
    write(
        *(tmp_path, POLICY, (1, "onload begins"), (2, "onload is done"), (3, "offload begins")),
        *((4, "offload failed: no answer"), (5, "onload begins"), (6, "stop is done")),
        *((9, "launch begins"), (11, "offload is done")),
    )
    write(tmp_path, "trainer.rank-0.log", (7, "is on the device"), (8, "is off the device"))
    write(tmp_path, JUDGE, (12, "onload begins"))
    assert seconds(spans_of(tmp_path, "run-1")) == [
        ("rollout", 0, 5),
        ("trainer", 6, 7),
        ("rollout", 8, 10),
        ("genrm", 11, float("inf")),
    ]
    nobody_held_beside_another(tmp_path, "run-1")


@pytest.mark.parametrize("began", [3, 5])
def test_one_who_begins_before_the_other_has_let_go_is_named(tmp_path: Path, began: int):
    write(tmp_path, POLICY, (1, "onload begins"), (6, "offload is done"))
    write(tmp_path, JUDGE, (began, "onload begins"), (9, "offload is done"))
    with pytest.raises(AssertionError, match=rf"judge.* began {6 - began}\.000 s before .*policy"):
        nobody_held_beside_another(tmp_path, "run-1")


def test_a_run_without_lines_shows_nothing(tmp_path: Path):
    write(tmp_path, POLICY)
    with pytest.raises(AssertionError):
        nobody_held_beside_another(tmp_path, "run-1")
