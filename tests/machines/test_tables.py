"""Every table: what a machine may never do."""

import pytest

from relax_infer.machines import ALL, REPLICA, IllegalTransition, Machine, ReplicaState

NOT_ENTERED = {("Replica", ReplicaState.UNKNOWN)}
"""States that no edge leads to, on purpose: UNKNOWN is discovery's word for lost sight."""


@pytest.fixture(params=ALL, ids=lambda machine: machine.name)
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param


def test_advance_follows_the_table_and_refuses_everything_else(machine: Machine):
    for state in machine.states:
        for event in machine.events:
            if machine.allows(state, event):
                assert machine.advance(state, event) is machine.transitions[state, event]
            else:
                with pytest.raises(IllegalTransition, match=f"{event} is not legal in {state}"):
                    machine.advance(state, event)


def test_a_refusal_says_what_would_be_legal(machine: Machine):
    state, event = next(
        (s, e) for s in machine.states for e in machine.events if not machine.allows(s, e)
    )
    with pytest.raises(IllegalTransition) as refused:
        machine.advance(state, event)
    assert all(e in str(refused.value) for e in machine.legal(state))


def test_nothing_leaves_a_terminal_state(machine: Machine):
    assert not [s for s, _ in machine.transitions if s in machine.terminal]


def test_every_state_can_be_reached(machine: Machine):
    seen = {machine.initial}
    while True:
        more = {t for (s, _), t in machine.transitions.items() if s in seen} - seen
        if not more:
            break
        seen |= more
    unreached = {(machine.name, state) for state in machine.states if state not in seen}
    assert unreached <= NOT_ENTERED


def test_from_every_reachable_state_an_end_or_a_rest_can_be_reached(machine: Machine):
    """No trap: a terminal state, or for entities without one the state they begin in."""
    goals = set(machine.terminal) or {machine.initial}
    good = set(goals)
    while True:
        more = {s for (s, _), t in machine.transitions.items() if t in good} - good
        if not more:
            break
        good |= more
    entered = {machine.initial, *machine.transitions.values()}
    assert entered <= good


def test_a_hold_ends_only_by_an_event_that_names_its_proof(machine: Machine):
    ending = {
        event
        for (source, event), target in machine.transitions.items()
        if machine.holds(source) and not machine.holds(target)
    }
    for event in ending:
        assert event.endswith(("_CONFIRMED", "_PROVED", "_BY_OPERATOR")) or event in (
            "BUDGET_SPENT",
        )


def test_a_table_cannot_be_changed(machine: Machine):
    with pytest.raises(TypeError):
        machine.transitions[machine.initial, next(iter(machine.events))] = machine.initial  # type: ignore[index]


def test_an_edge_cannot_be_both_there_and_forbidden():
    state, event = next(iter(REPLICA.transitions))
    with pytest.raises(ValueError, match="both an edge and forbidden"):
        Machine(
            name="x",
            states=REPLICA.states,
            events=REPLICA.events,
            initial=REPLICA.initial,
            transitions=REPLICA.transitions,
            forbidden={(state, event): "because"},
        )
