"""A policy that does not swing, does not hurry and never leaves its bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relax_infer.scaling import AutoscaleMemory, AutoscalePolicy, Load, decide

FRESH = AutoscaleMemory()


def policy(**fields: object) -> AutoscalePolicy:
    return AutoscalePolicy.model_validate(
        {"min_replicas": 1, "max_replicas": 8, "queue_high": 10, "queue_low": 2, **fields}
    )


policies = st.builds(
    lambda low, room, queue, gap, **rest: policy(
        min_replicas=low, max_replicas=low + room, queue_low=queue, queue_high=queue + gap, **rest
    ),
    st.integers(1, 4),
    st.integers(0, 8),
    st.floats(0, 20),
    st.floats(0.5, 20),
    looks=st.integers(1, 4),
    most_at_once=st.integers(1, 4),
    cool_down_out=st.floats(0, 100),
    cool_down_in=st.floats(0, 400),
    slow_seconds=st.none() | st.floats(1, 100),
)
looks = st.lists(
    st.tuples(st.floats(0.1, 100), st.integers(0, 400), st.none() | st.floats(0, 200)), max_size=60
)


@given(policies, st.integers(0, 20), looks)
def test_bounds_and_cool_downs_are_kept_whatever_comes(
    wanted: AutoscalePolicy, replicas: int, seen: list[tuple[float, int, float | None]]
):
    memory, at = FRESH, 0.0
    changes: list[tuple[float, int]] = []
    for pause, queued, seconds in seen:
        at += pause
        load = Load(at=at, replicas=replicas, queued=queued, generation_seconds=seconds)
        decided = decide(wanted, memory, load)
        assert wanted.min_replicas <= decided.target <= wanted.max_replicas
        assert decided.reason
        inside = wanted.min_replicas <= replicas <= wanted.max_replicas
        step = decided.target - replicas
        if step and inside and changes:
            needed = wanted.cool_down_out if step > 0 else wanted.cool_down_in
            assert at - changes[-1][0] >= needed
        if inside:
            assert -1 <= step <= wanted.most_at_once
        if step:
            changes.append((at, step))
        replicas, memory = decided.target, decided.memory


@given(policies, st.integers(0, 300))
def test_a_steady_load_comes_to_rest_and_stays_there(wanted: AutoscalePolicy, queued: int):
    wanted = wanted.model_copy(update={"slow_seconds": None})
    memory, replicas = FRESH, wanted.min_replicas
    targets: list[int] = []
    for look in range(200):
        decided = decide(wanted, memory, Load(at=500.0 * look, replicas=replicas, queued=queued))
        replicas, memory = decided.target, decided.memory
        targets.append(replicas)
    assert len(set(targets[-50:])) == 1
    rises = [b - a for a, b in pairwise(targets) if b != a]
    assert all(step > 0 for step in rises) or all(step < 0 for step in rises), "it swings"
    at_rest = targets[-1]
    assert at_rest == wanted.max_replicas or queued <= wanted.queue_high * at_rest


def after(seen: list[int], **fields: object) -> int:
    """The target after looks a minute apart at two replicas."""
    memory, replicas = FRESH, 2
    for k, queued in enumerate(seen):
        decided = decide(policy(**fields), memory, Load(at=60.0 * k, replicas=2, queued=queued))
        replicas, memory = decided.target, decided.memory
    return replicas


def test_one_look_is_not_enough_and_one_that_differs_begins_anew():
    assert after([50]) == after([50, 50]) == 2
    assert after([50, 50, 50]) == 5
    assert after([50, 50, 10, 50, 50]) == 2
    assert after([0, 0, 0]) == 1
    assert after([0, 0, 15, 0, 0]) == 2


def test_a_slow_batch_asks_for_one_more_and_a_short_queue_does_not_take_it_back():
    memory = FRESH
    decided = decide(policy(), memory, Load(at=-60.0, replicas=2, queued=10))
    for k in range(3):
        load = Load(at=60.0 * k, replicas=2, queued=0, generation_seconds=90.0)
        decided = decide(policy(slow_seconds=60), memory, load)
        memory = decided.memory
    assert decided.target == 3
    assert decided.reason == "a batch took 90 s, more than 60"


def test_reasons_say_what_is_waited_for():
    decided = decide(policy(), FRESH, Load(at=0.0, replicas=2, queued=50))
    assert decided.reason == "50 requests wait for 2 replicas; look 1 of 3"
    most = decide(policy(max_replicas=2), FRESH, Load(at=0.0, replicas=2, queued=50))
    assert most.reason.endswith("; 2 is the most")
    recent = AutoscaleMemory(changed_at=0.0, high=5)
    cooling = decide(policy(), recent, Load(at=20.0, replicas=2, queued=50))
    assert cooling.reason.endswith("; cools down, 20 s")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": 9}, "max_replicas 8 is below min_replicas 9"),
        ({"queue_low": 10}, "queue_low 10 must be below queue_high 10"),
        ({"queue_hihg": 10}, "queue_hihg"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(fields: dict[str, object], told: str):
    with pytest.raises(ValidationError, match=told):
        policy(**fields)
