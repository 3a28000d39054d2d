"""Each transition of a scale operation is taken away, or leads elsewhere: a case must notice."""

from enum import StrEnum
from typing import Any

import pytest

from relax_infer.machines import SCALE, IllegalTransition, Machine, ScaleState
from tests.machines.mutants import Edge, Mutate, fresh, leading_to, without
from tests.machines.scaling import carry_out, cases
from tests.machines.values import Violation

_AT_THE_END = "that some failed is told when the others are to answer, not before"
NOT_IN_THE_CASES = {
    f"{state} on SOME_FAILED": _AT_THE_END
    for state in ("CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING")
}
"""Transitions that no operation takes, and why."""


def _name(edge: Edge) -> str:
    return f"{edge[0]} on {edge[1]}"


EDGES = [
    pytest.param(edge, id=_name(edge).replace(" ", "-"))
    for edge in SCALE.transitions
    if _name(edge) not in NOT_IN_THE_CASES
]


def caught(mutate: Mutate) -> str | None:
    with fresh() as patch:
        mutate(patch)
        for case in cases():
            try:
                carry_out(case)
            except (Violation, IllegalTransition) as broken:
                return str(broken)
    return None


def test_every_case_ends_as_its_replicas_did():
    for case in cases():
        carry_out(case)


@pytest.mark.parametrize("edge", EDGES)
def test_a_missing_transition_is_noticed(edge: Edge):
    assert caught(without(SCALE, edge))


@pytest.mark.wide
@pytest.mark.parametrize("edge", EDGES)
def test_a_transition_that_leads_elsewhere_is_noticed(edge: Edge):
    right = SCALE.transitions[edge]
    for state in ScaleState:
        if state is not right:
            assert caught(leading_to(SCALE, edge, state)), f"{_name(edge)} may lead to {state}"


def test_the_cases_take_every_other_transition():
    taken: set[str] = set()
    advance = Machine.advance

    def noting(self: Machine[Any, Any], state: StrEnum, event: StrEnum) -> StrEnum:
        taken.add(_name((state, event)))
        return advance(self, state, event)

    with fresh() as patch:
        patch.setattr(Machine, "advance", noting)
        for case in cases():
            carry_out(case)
    assert {_name(edge) for edge in SCALE.transitions} - taken == set(NOT_IN_THE_CASES)
