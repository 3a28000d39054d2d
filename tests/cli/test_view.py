"""A finished step in one line."""

from relax_infer.cli._errors import Code
from relax_infer.cli._explain import Evidence, explain
from relax_infer.cli._glance import Glance
from relax_infer.cli._history import Told
from relax_infer.cli._steps import gave_up
from relax_infer.cli._view import finished_line
from relax_infer.contracts.engines import GroupSnapshot, ReplicaReport
from relax_infer.contracts.lease import LeaseStatus, RoleLease
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import (
    Evaluation,
    GaveUp,
    RunProgress,
    RunStatus,
    SetEvaluation,
    StepRecord,
    StepResult,
    more_than_accuracy,
)
from relax_infer.machines import GroupState, LeaseState, ReplicaState, RunState, StepPhase

MANY = SetEvaluation(name="many", problems=16, samples=8, accuracy=0.25, pass_at={1: 0.25, 8: 0.75})
EVALUATION = Evaluation(
    step=4,
    weight_version=4,
    problems=64,
    accuracy=0.5,
    sets=(SetEvaluation(name="greedy", problems=64, samples=1, accuracy=0.5, unanswered=2), MANY),
)


def test_the_log_prob_difference_the_sets_and_a_warning_are_told():
    line = finished_line(
        RunProgress(
            step=4,
            accuracy=0.5,
            evaluated=more_than_accuracy(EVALUATION),
            logprob_gap=1.234e-5,
            seconds=7.0,
            alarms=("too far apart",),
        )
    )
    assert line == (
        "step   4  done in 7.0 s  accuracy 0.500  log-prob gap 1.2e-05  greedy 0.500  many 0.250"
        "  many pass@8 0.750  warning: too far apart"
    )


def test_one_set_says_no_more_than_the_accuracy():
    only = EVALUATION.model_copy(update={"sets": EVALUATION.sets[:1]})
    assert more_than_accuracy(only) == {}
    assert more_than_accuracy(None) == {}


def test_a_finished_step_explains_every_set_and_every_warning():
    result = StepResult(
        step=4,
        weights=WeightsRef(version=4, uri="u", digest="d"),
        evaluation=EVALUATION,
        alarms=("too far apart",),
    )
    notes = explain(Evidence("run-1", 4, 0.0, result=result)).notes
    assert "Warning: too far apart." in notes
    assert (
        "Accuracy 0.500 on greedy (64 problems), with weights 4; 2 answers were refused." in notes
    )
    assert (
        "Accuracy 0.250, pass@1 0.250, pass@8 0.750 on many (16 problems, 8 answers each),"
        " with weights 4." in notes
    )


def test_attempts_that_gave_up_before_are_told():
    result = StepResult(step=4, weights=WeightsRef(version=4, uri="u", digest="d"))
    lost = GaveUp(error="its lease was ended by hand", began=1.0, ended=2.0)
    written = StepRecord(
        run="run-1",
        step=4,
        outcome=StepPhase.FAILED,
        result=result,
        error="no answer",
        earlier=(lost,),
    )
    assert gave_up(written, over=True) == ("its lease was ended by hand",)
    assert gave_up(written, over=False) == ("its lease was ended by hand", "no answer")
    known = Evidence("run-1", 4, 0.0, result=result, earlier=gave_up(written, over=False))
    assert explain(known).notes[:2] == (
        "Attempt 1 gave up: its lease was ended by hand",
        "Attempt 2 gave up: no answer",
    )


def test_a_step_that_was_ended_from_outside_is_not_at_work_and_names_what_tries_it_again():
    run = RunStatus(
        run="run-1",
        state=RunState.BLOCKED,
        doing="step 4 gave up: Terminated",
        step=3,
        target=9,
        weight_version=3,
    )
    told = Told(
        began=1.0, ended=9.0, entered=[(StepPhase.TRAINING, 2.0)], closed="TERMINATED", error=None
    )
    told.asked["one"] = ("run-1.lease", "release", 3.0)
    found = explain(Evidence("run-1", 4, 60.0, glance=Glance(run), told=told))
    assert found.headline == "Step 4 of run-1 was ended from outside (TERMINATED) in TRAINING."
    assert not any("Waits since" in note or "At work" in note for note in found.notes)
    assert "Again: relax-infer step retry run-1 4 --who NAME --why TEXT" in found.cures
    assert found.code is Code.BLOCKED


def test_a_reason_is_said_once_though_lease_group_and_replica_all_have_it():
    lost = "policy/replica-0: the placement group is lost. Bring its GPUs back."
    replica = ReplicaReport(
        replica=0, engine_id="policy/replica-0", state=ReplicaState.FAILED, error=lost
    )
    other = ReplicaReport(
        replica=1, engine_id="policy/replica-1", state=ReplicaState.FAILED, error="it is gone"
    )
    group = GroupSnapshot(
        role="rollout",
        model="policy",
        state=GroupState.BLOCKED,
        weight_source="ACTOR",
        replicas=(replica, other),
        stuck=f"{lost}; it is gone",
    )
    lease = LeaseStatus(
        pool="default",
        fence_counter=4,
        roles={"rollout": RoleLease(state=LeaseState.BLOCKED, reason=f"onload: {lost}")},
        batch=None,
        holder="rollout",
    )
    run = RunStatus(
        run="run-1", state=RunState.RUNNING, doing="step 4", step=3, target=9, weight_version=3
    )
    told = Told(began=1.0, ended=None, entered=[(StepPhase.TRAINING, 2.0)], closed=None, error=None)
    glance = Glance(run, lease=lease, groups=(group,))
    found = explain(Evidence("run-1", 4, 60.0, glance=glance, told=told))
    assert sum(lost in note for note in found.notes) == 1
    assert "rollout policy/replica-0 is FAILED: as said above." in found.notes
    assert "rollout policy/replica-1 is FAILED: it is gone." in found.notes
    assert not any(note.startswith("rollout policy:") for note in found.notes)
    assert not any(".." in note for note in found.notes)
    assert "The lease looks again by itself; what its reason asks for may be done at once." in (
        found.cures
    )
