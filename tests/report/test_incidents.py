"""What went wrong, and how long it took."""

from relax_infer.machines import RecoveryState
from relax_infer.report.incidents import incidents_of, recoveries_of
from relax_infer.report.spans import transitions_of
from tests.report.records import BEGAN, a_record, a_recovery, a_retry, transitions


def told(*steps):
    return {i.what: i for i in incidents_of(steps, transitions_of(steps))}


def test_a_lost_replica_was_well_at_the_latest_when_its_lease_became_active():
    [incident] = [told(a_record(1, recoveries=(a_recovery(1),)))["replica lost"]]
    assert incident.to_notice == 1.0  # ACTIVE a second into the step, noticed after two
    assert incident.to_mend == 12.0
    assert incident.ending == "rebuilt and readmitted"


def test_a_recovery_of_two_records_is_one_and_counts_as_it_was_told_last():
    at = BEGAN + 12
    begun = a_recovery(1, states=((RecoveryState.FENCED, at),), ended=None)
    steps = (a_record(1, recoveries=(begun,)), a_record(2, recoveries=(a_recovery(1),)))
    assert recoveries_of(steps) == [a_recovery(1)]
    assert told(*steps)["replica lost"].step == 1


def test_one_that_is_blocked_is_not_mended_and_says_so():
    at = BEGAN + 12
    states = ((RecoveryState.FENCED, at), (RecoveryState.BLOCKED, at + 4))
    open_one = a_recovery(1, states=states, ended=None)
    incident = told(a_record(1, recoveries=(open_one,)))["replica lost"]
    assert incident.to_mend is None
    assert incident.ending == "was BLOCKED"


def test_the_word_of_a_person_is_in_the_ending():
    at = BEGAN + 12
    states = ((RecoveryState.FENCED, at), (RecoveryState.ABANDONED, at + 4))
    gone = a_recovery(1, states=states, resolved_by="ada: the node is off")
    ending = told(a_record(1, recoveries=(gone,)))["replica lost"].ending
    assert ending == "given up; its GPUs are free, on the word of ada: the node is off"


def test_a_lease_that_stays_blocked_through_several_looks_is_one_incident():
    moves = (
        (0.0, "genrm", "GRANTED", "ONLOADING"),
        (2.0, "genrm", "TIMED_OUT", "BLOCKED"),
        (3.0, "genrm", "TIMED_OUT", "BLOCKED"),
        (9.0, "genrm", "RESOLVED_BY_OPERATOR", "SLEEPING"),
    )
    record = a_record(1, transitions=transitions(BEGAN + 10, 1, *moves))
    found = incidents_of([record], transitions_of([record]))
    assert [(i.what, i.to_notice, i.to_mend) for i in found] == [("lease blocked", 2.0, 7.0)]
    assert found[0].ending == "resolved by operator: SLEEPING"


def test_a_repeated_phase_a_lost_attempt_and_an_alarm_are_incidents():
    from relax_infer.contracts.run import GaveUp

    record = a_record(1, retries=(a_retry(1),), transitions=())
    result = record.result.model_copy(update={"alarms": ("too far apart",)})
    earlier = (GaveUp(error="no engine", began=BEGAN, ended=BEGAN + 5),)
    found = told(record.model_copy(update={"result": result, "earlier": earlier}))
    assert found["phase repeated"].to_notice == 1.5
    assert found["phase repeated"].to_mend == 6.5
    assert found["step gave up"].to_mend == 11.5  # the step's end is 16.5 s after BEGAN
    assert found["alarm"].cause == "too far apart"


def test_a_phase_that_no_later_attempt_made_good_has_failed():
    retry = a_retry(1).model_copy(update={"recovered": None})
    incident = told(a_record(1, retries=(retry,)))["phase failed"]
    assert incident.to_mend is None
    assert incident.ending == "no later attempt succeeded"
