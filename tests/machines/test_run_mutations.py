"""A run in every place that persons, roles, steps and the lease can bring it to; and each of its
transitions taken away, which must be noticed."""

from enum import StrEnum
from typing import Any

import pytest

from relax_infer.machines import RUN, IllegalTransition, Machine, RunState
from tests.machines.mutants import Edge, fresh, without
from tests.machines.running import explore, play
from tests.machines.values import Violation

NOT_IN_THE_WORLD = {
    "STOPPING on GAVE_UP": "a run that cannot start and was asked to stop has been stopped",
    "BLOCKED on GAVE_UP": "what a run takes down waits for a person before it is taken down",
}
"""Transitions that no run takes, and why."""


def _name(edge: Edge) -> str:
    return f"{edge[0]} on {edge[1]}"


EDGES = [
    pytest.param(edge, id=_name(edge).replace(" ", "-"))
    for edge in RUN.transitions
    if _name(edge) not in NOT_IN_THE_WORLD
]


@pytest.mark.parametrize("edge", EDGES)
def test_a_missing_transition_is_noticed(edge: Edge):
    with fresh() as patch:
        without(RUN, edge)(patch)
        with pytest.raises((Violation, IllegalTransition)):
            explore()


@pytest.mark.wide
def test_a_run_comes_to_its_end_from_everywhere_and_takes_every_other_transition():
    taken: set[str] = set()
    advance = Machine.advance

    def noting(self: Machine[Any, Any], state: StrEnum, event: StrEnum) -> StrEnum:
        after = advance(self, state, event)
        taken.add(_name((state, event)))
        return after

    with fresh() as patch:
        patch.setattr(Machine, "advance", noting)
        found = explore()
    assert {place.state for place in found.ended} == {RunState.DONE, RunState.FAILED}
    assert {_name(edge) for edge in RUN.transitions} - taken == set(NOT_IN_THE_WORLD)


def test_a_pause_that_is_asked_for_while_a_run_that_cannot_start_is_taken_down_ends_nothing():
    """A person had resolved what the lease waited for, so the run seemed to go on."""
    script = ("open_fails", "lease_blocked", "lease_unblocked", "pause", "closed")
    assert play(script).ended
