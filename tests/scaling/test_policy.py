"""A policy that does not swing, does not hurry and never leaves its bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from relax_infer.scaling import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    AutoscaleMemory,
    AutoscalePolicy,
    Load,
    decide,
    settled,
)

FRESH = AutoscaleMemory()


def policy(**fields: object) -> AutoscalePolicy:
    return AutoscalePolicy.model_validate(
        {"min_replicas": 1, "max_replicas": 8, "in_flight_high": 10, "in_flight_low": 2, **fields}
    )


policies = st.builds(
    lambda low, room, queue, gap, **rest: policy(
        min_replicas=low,
        max_replicas=low + room,
        in_flight_low=queue,
        in_flight_high=queue + gap,
        **rest,
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
        load = Load(at=at, replicas=replicas, in_flight=queued, batch_seconds=seconds)
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
        decided = decide(wanted, memory, Load(at=500.0 * look, replicas=replicas, in_flight=queued))
        replicas, memory = decided.target, decided.memory
        targets.append(replicas)
    assert len(set(targets[-50:])) == 1
    rises = [b - a for a, b in pairwise(targets) if b != a]
    assert all(step > 0 for step in rises) or all(step < 0 for step in rises), "it swings"
    at_rest = targets[-1]
    assert at_rest == wanted.max_replicas or queued <= wanted.in_flight_high * at_rest


def after(seen: list[int], **fields: object) -> int:
    """The target after looks a minute apart at two replicas."""
    memory, replicas = FRESH, 2
    for k, queued in enumerate(seen):
        decided = decide(policy(**fields), memory, Load(at=60.0 * k, replicas=2, in_flight=queued))
        replicas, memory = decided.target, decided.memory
    return replicas


def test_one_look_is_not_enough_and_one_that_differs_begins_anew():
    assert after([50]) == after([50, 50]) == 2
    assert after([50, 50, 50]) == 5
    assert after([50, 50, 10, 50, 50]) == 2
    assert after([1, 1, 1]) == 1
    assert after([1, 1, 15, 1, 1]) == 2


def test_a_slow_batch_asks_for_one_more_and_a_short_queue_does_not_take_it_back():
    memory = FRESH
    decided = decide(policy(), memory, Load(at=-60.0, replicas=2, in_flight=10))
    for k in range(3):
        load = Load(at=60.0 * k, replicas=2, in_flight=0, batch_seconds=90.0, step=k)
        decided = decide(policy(slow_seconds=60), memory, load)
        memory = decided.memory
    assert decided.target == 3
    assert decided.reason == "a batch took 90 s, more than 60"


def test_reasons_say_what_is_waited_for():
    decided = decide(policy(), FRESH, Load(at=0.0, replicas=2, in_flight=50))
    assert decided.reason == "50 requests in flight on 2 replicas; look 1 of 3"
    most = decide(policy(max_replicas=2), FRESH, Load(at=0.0, replicas=2, in_flight=50))
    assert most.reason.endswith("; 2 is the most")
    recent = AutoscaleMemory(changed_at=0.0, high=5)
    cooling = decide(policy(), recent, Load(at=20.0, replicas=2, in_flight=50))
    assert cooling.reason.endswith("; cools down, 20 s")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_replicas": 0}, "max_replicas"),
        ({"min_replicas": 9}, "max_replicas 8 is below min_replicas 9"),
        ({"in_flight_low": 10}, "in_flight_low 10 must be below in_flight_high 10"),
        ({"in_flight_hihg": 10}, "in_flight_hihg"),
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(fields: dict[str, object], told: str):
    with pytest.raises(ValidationError, match=told):
        policy(**fields)


def test_an_idle_look_says_nothing_unless_it_is_to_count():
    assert after([0] * 9) == 2
    assert after([0] * 3, idle_counts=True) == 1
    assert after([1, 0, 1, 0, 1]) == 1, "what agrees may be apart by idle looks"


def test_one_slow_batch_counts_once_however_often_it_is_looked_at():
    wanted, memory = policy(slow_seconds=60), FRESH
    for k in range(9):
        load = Load(at=60.0 * k, replicas=2, in_flight=5, batch_seconds=90.0, step=7)
        decided = decide(wanted, memory, load)
        assert decided.target == 2
        memory = decided.memory
    assert memory.high == 1


@given(st.floats(61, 200), st.integers(2, 8), st.floats(1, 9))
def test_a_slow_batch_does_not_make_replicas_come_and_go(
    seconds: float, most: int, in_flight: float
):
    """Time that goes down as replicas come up: it comes to rest."""
    wanted = policy(slow_seconds=60, max_replicas=most)
    memory, replicas = FRESH, 1
    targets: list[int] = []
    for look in range(120):
        took = seconds / replicas
        load = Load(
            at=500.0 * look, replicas=replicas, in_flight=in_flight, batch_seconds=took, step=look
        )
        decided = decide(wanted, memory, load)
        replicas, memory = decided.target, decided.memory
        targets.append(replicas)
    assert len(set(targets[-40:])) == 1
    assert all(a <= b for a, b in pairwise(targets)), "it swings"


@given(policies, st.floats(0, 300), st.lists(st.booleans(), min_size=1, max_size=40))
def test_after_failures_the_pauses_grow_and_nothing_is_done_in_them(
    wanted: AutoscalePolicy, busy: float, wells: list[bool]
):
    memory, replicas, at = FRESH, wanted.min_replicas, 0.0
    failed_at: float | None = None
    failures = 0
    for well in wells:
        for _ in range(200):
            at += 50.0
            load = Load(at=at, replicas=replicas, in_flight=busy)
            decided = decide(wanted, memory, load)
            memory = decided.memory
            if decided.target != replicas:
                break
        else:
            return
        if failed_at is not None:
            pause = min(FIRST_PAUSE * 2 ** (failures - 1), LONGEST_PAUSE)
            assert at - failed_at >= pause
        failures = 0 if well else failures + 1
        replicas = decided.target if well else replicas
        failed_at = None if well else at
        memory = settled(memory, at, well=well)


def test_a_failure_is_told_with_what_is_left_of_its_pause():
    memory = settled(settled(FRESH, 0.0, well=False), 100.0, well=False)
    decided = decide(policy(), memory, Load(at=130.0, replicas=2, in_flight=50))
    assert decided.reason == "the last operation failed 2 times; waits 90 s more"
    assert decided.memory == memory
    assert settled(memory, 200.0, well=True).failures == 0
