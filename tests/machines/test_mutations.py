"""Each rule broken on purpose: the model must notice.

Every transition of the six machines that the model uses is taken away, every forbidden one is
added, and every guard is weakened. :data:`SURVIVORS` and :data:`NOT_IN_THE_MODEL` say what is not
noticed, and why. The tables of runs and of scale operations have worlds of their own.
"""

from enum import StrEnum
from typing import Any

import pytest

from relax_infer.machines import STEP, Machine
from tests.machines.explore import explore
from tests.machines.mutants import (
    DEEP,
    ENGINE_GUARDS,
    GLUE,
    JUDGED_AND_TAUGHT,
    LEASE_GUARDS,
    LOST_LEASE,
    MACHINES,
    ONE_WAY,
    SHALLOW,
    TAUGHT,
    Edge,
    Mutate,
    fresh,
    what_catches,
    with_forbidden,
    without,
)

_NOBODY = "nothing records it"
_AT_WORK = "a state of an operation at work, and operations on one engine go in turn"
_ASLEEP = "the model stops a role only after the lease took the pool back, when it sleeps or failed"
_AWAKE = "the model's weight sync loads into engines that sleep, never in place"
_NO_LOAD = "the model's recoveries launch with the right weights and load no others"
_NO_STUDENT = "the model's student scores nothing: it needs no role of its own"
_NO_EVALUATION = "the model evaluates nothing"
_AT_ONCE = "the model enters and leaves it in one event"

NOT_IN_THE_MODEL: dict[str, str] = {
    "Group READY on WEIGHTS_UPDATE_STARTED": _AWAKE,
    "Group READY on OPERATION_UNCONFIRMED": _NOBODY,
    "Group ONLOADING on DRAIN_STARTED": _AT_WORK,
    "Group STARTING on STOP_STARTED": _AT_WORK,
    "Group DRAINING on STOP_STARTED": _AT_WORK,
    "Group ONLOADING on STOP_STARTED": _AT_WORK,
    "Group READY on STOP_STARTED": _ASLEEP,
    "Replica READY on WEIGHTS_UPDATE_STARTED": _AWAKE,
    "Replica DRAINING on STOP_STARTED": _AT_WORK,
    "Recovery SYNCING on REBUILD_FAILED": _NO_LOAD,
    "Step phase PREPARING on WEIGHT_SYNC_STARTED": "the model has no step 0",
    "Step phase ROLLOUT_OFFLOADING on STUDENT_SCORING_STARTED": _NO_STUDENT,
    "Step phase GENRM_SCORING on STUDENT_SCORING_STARTED": _NO_STUDENT,
    "Step phase TEACHER_SCORING on STUDENT_SCORING_STARTED": _NO_STUDENT,
    "Step phase STUDENT_SCORING on SCORES_IN": _NO_STUDENT,
    "Step phase STUDENT_SCORING on GAVE_UP": _NO_STUDENT,
    "Step phase SYNCING_WEIGHTS on EVALUATION_STARTED": _NO_EVALUATION,
    "Step phase EVALUATING on COMPLETED": _NO_EVALUATION,
    "Step phase EVALUATING on GAVE_UP": _NO_EVALUATION,
    "Step phase WRITING_BACK on GAVE_UP": _AT_ONCE,
    "Step phase COMMITTED on GAVE_UP": _AT_ONCE,
}
"""Transitions that no search takes, and why."""

SURVIVORS: dict[str, str] = {
    "without Replica DRAINING on DEATH_NOTICED": "a loss that a table does not allow is left to"
    " the next probe",
    "probe-under-any-token": "a sleep is proved by a release under the asked token, not by looks",
    "probe-of-one-proves-all": "every engine that can be asked has to let go once more",
    "trainer-orphan-is-not-doubted": "the probe's own release looks for an earlier process again",
    "death-is-not-noticed": "a dead server answers nothing, so every operation on it fails anyway",
}
"""Mutants that every search lets pass, and why that is right."""

NEEDS_TWO_FAULTS = frozenset(
    {
        *("tokens-never-end", "tokens-do-not-end-at-the-engines"),
        *("engine-forgets-the-end-of-its-token", "killed-without-proof"),
        *("probe-under-any-token", "probe-of-one-proves-all", "resolve-does-nothing"),
        *("recovery-does-not-stop", "recovery-does-not-wait-for-proof"),
        *("trainer-forgets-a-partial-load", "a-probe-of-any-grant-counts"),
        *("a-probe-leaves-the-trainer-its-token", "a-word-leaves-the-trainer-its-token"),
        "the-trainer-does-not-ask-whether-its-grant-is-closed",
        "nobody-tells-the-lease-of-a-lost-holder",
        *("without Replica ONLOADING on DEATH_NOTICED", "without Replica READY on STOP_STARTED"),
        "without Replica ONLOADING on STOP_STARTED",
        "without Replica FAILED on RESOLVED_BY_OPERATOR",
        *("without Recovery STOPPING on PROOF_FAILED", "without Recovery PROVING on PROOF_FAILED"),
        "without Recovery BLOCKED on LEFT_RELEASE_PROVED",
        "without Recovery BLOCKED on RESOLVED_BY_OPERATOR",
        "without Recovery REBUILDING on REBUILD_FAILED",
        "without Recovery CHECKING on CHECK_FAILED",
        *("with Recovery FENCED on REBUILT", "with Recovery FENCED on LEFT_RELEASE_PROVED"),
        "with Recovery BLOCKED on REBUILT",
        *(
            "without Step phase PREPARING on GAVE_UP",
            "without Step phase SYNCING_WEIGHTS on GAVE_UP",
        ),
    }
)
"""Mutants for which the shallow searches would be tried in vain."""


_STEP_IN_CI = (STEP.events.PUBLISHED, STEP.events.TRAINING_STARTED)


def _name(machine: Machine[Any, Any], edge: Edge) -> str:
    return f"{machine.name} {edge[0]} on {edge[1]}"


def _each_edge(attribute: str) -> list[Any]:
    return [
        pytest.param(
            machine,
            edge,
            id=_name(machine, edge).replace(" ", "-"),
            marks=[pytest.mark.wide] if machine is STEP and edge[1] not in _STEP_IN_CI else [],
        )
        for machine in MACHINES
        for edge in getattr(machine, attribute)
        if _name(machine, edge) not in NOT_IN_THE_MODEL
    ]


def _is_noticed(name: str, mutate: Mutate) -> None:
    deep = () if name in SURVIVORS else DEEP
    searches = DEEP if name in NEEDS_TWO_FAULTS else (*SHALLOW, *deep)
    caught = what_catches(mutate, (ONE_WAY[name],) if name in ONE_WAY else searches)
    print(f"\n{name}: {caught}")
    if name in SURVIVORS:
        assert caught is None, f"{name} is noticed now: {caught}"
    else:
        assert caught is not None, f"{name} survives every search"


@pytest.mark.parametrize(("machine", "edge"), _each_edge("transitions"))
def test_a_missing_transition_is_noticed(machine: Machine[Any, Any], edge: Edge):
    _is_noticed(f"without {_name(machine, edge)}", without(machine, edge))


@pytest.mark.parametrize(("machine", "edge"), _each_edge("forbidden"))
def test_a_forbidden_transition_is_noticed(machine: Machine[Any, Any], edge: Edge):
    _is_noticed(f"with {_name(machine, edge)}", with_forbidden(machine, edge))


@pytest.mark.parametrize("name", LEASE_GUARDS)
def test_a_weak_guard_of_the_lease_is_noticed(name: str):
    _is_noticed(name, LEASE_GUARDS[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", ENGINE_GUARDS)
def test_a_weak_guard_of_an_engine_or_group_is_noticed(name: str):
    _is_noticed(name, ENGINE_GUARDS[name])


@pytest.mark.wide
@pytest.mark.parametrize("name", GLUE)
def test_a_workflow_that_goes_wrong_between_two_rules_is_noticed(name: str):
    _is_noticed(name, GLUE[name])


def test_the_searches_take_every_other_transition():
    taken: set[str] = set()
    advance = Machine.advance

    def noting(self: Machine[Any, Any], state: StrEnum, event: StrEnum) -> StrEnum:
        target = advance(self, state, event)
        taken.add(_name(self, (state, event)))
        return target

    with fresh() as patch:
        patch.setattr(Machine, "advance", noting)
        for config in (*SHALLOW[1:4], LOST_LEASE, TAUGHT, JUDGED_AND_TAUGHT, *DEEP[2:]):
            explore(config, live=False)
    known = {_name(machine, edge) for machine in MACHINES for edge in machine.transitions}
    assert known - taken == set(NOT_IN_THE_MODEL)
