"""When roles held their GPUs, and what part of a step was work."""

import pytest

from relax_infer.machines import StepPhase
from relax_infer.report.spans import Kind, SpanIndex, spans_of, time_of, transitions_of
from tests.report.records import BEGAN, a_record, transitions


def test_each_grant_is_split_into_coming_up_use_and_doubt():
    spans = spans_of(transitions_of([a_record(0)]), BEGAN + 6)
    assert [(s.kind, s.start - BEGAN, s.seconds) for s in spans] == [
        (Kind.MOVING, 0.0, 1.0),
        (Kind.ACTIVE, 1.0, 2.0),
        (Kind.BLOCKED, 3.0, 2.0),
    ]


def test_what_two_steps_tell_is_one_transition():
    """Steps that overlap have the same ones on record."""
    assert len(transitions_of([a_record(0), a_record(0)])) == 4


def test_a_grant_that_goes_on_ends_where_the_records_do():
    moves = ((0.0, "rollout", "GRANTED", "ONLOADING"), (1.0, "rollout", "x", "ACTIVE"))
    record = a_record(0, transitions=transitions(BEGAN, 0, *moves))
    assert spans_of(transitions_of([record]), BEGAN + 7)[-1].seconds == 6.0


def test_control_is_what_is_neither_a_roles_work_nor_the_batchs_way():
    """Generating takes 4 s, 2 of them ACTIVE; training 2.5 s, without any lease on record."""
    record = a_record(1)
    told = time_of(record, SpanIndex(spans_of(transitions_of([record]), BEGAN + 17)))
    assert (told.work, told.data, told.control) == (2.0, 0.0, 4.5)
    assert told.control_share == pytest.approx(4.5 / 6.5)
    phase, first, last = told.parts[0]
    assert phase.phase is StepPhase.GENERATING
    assert (first - BEGAN - 10, last - BEGAN - 10) == (1.0, 3.0)


def test_a_lease_that_is_never_given_back_makes_its_phase_all_work():
    moves = ((-50.0, "rollout", "GRANTED", "ONLOADING"), (-40.0, "rollout", "x", "ACTIVE"))
    record = a_record(1, transitions=transitions(BEGAN + 10, 1, *moves))
    told = time_of(record, SpanIndex(spans_of(transitions_of([record]), BEGAN + 99)))
    assert told.work == 4.0
