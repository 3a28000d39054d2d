import pytest

from relax_infer.discovery import Generations, engine_id
from relax_infer.discovery.identity import rank_of


def test_a_logical_replica_is_named_after_its_model_and_place() -> None:
    assert engine_id("judge", 2) == "judge/replica-2"
    assert engine_id(None, 0) == "__default__/replica-0"
    assert engine_id("policy", 1, rank_offset=8) == "policy/group-8/replica-1"
    assert engine_id("policy", 1, rank_offset=0) == "policy/group-0/replica-1"


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("judge/replica-2", 2),
        ("policy/group-8/replica-1", 9),
        ("math/epoch/inner/replica-11", 11),
        ("math/epoch/inner/group-4/replica-1", 5),
        ("replica-3", 3),
        ("xreplica-3", None),
        ("judge/replica-x", None),
        ("engine", None),
    ],
)
def test_a_name_tells_the_rank(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_a_generation_rises_with_the_workers_and_with_the_address() -> None:
    seen = Generations()
    workers = ["head", "follower"]
    assert seen.observe("m/replica-0", workers, "http://h:1") == 1
    assert seen.observe("m/replica-0", workers, "http://h:1") == 1
    assert seen.observe("m/replica-0", ["head", "another follower"], "http://h:1") == 2
    assert seen.observe("m/replica-0", ["head", "another follower"], "http://h:2") == 3
    assert seen.observe("m/replica-0", ["new head", "another follower"], "http://h:3") == 4
    assert seen.observe("m/replica-1", workers, None) == 1


def test_an_address_that_is_only_missing_for_a_while_is_no_new_generation() -> None:
    seen = Generations()
    for url in (None, "http://h:1", None, "http://h:1"):
        assert seen.observe("m/replica-0", ["w"], url) == 1
    seen.observe("m/replica-0", ["w"], None)
    assert seen.observe("m/replica-0", ["w"], "http://h:2") == 2
