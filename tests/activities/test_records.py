"""What the record of a step keeps of its earlier attempts."""

from activities.records import after
from relax_infer.contracts.refs import WeightsRef
from relax_infer.contracts.run import GaveUp, PhaseRetry, PhaseTime, StepRecord, StepResult
from relax_infer.machines import StepPhase

RETRY = PhaseRetry(
    phase=StepPhase.GENERATING, what="generate", attempt=1, began=1, failed=2, error="gone"
)


def a_record(began: float, error: str | None) -> StepRecord:
    return StepRecord(
        run="run-1",
        step=4,
        outcome=StepPhase.FAILED if error else StepPhase.DONE,
        error=error,
        result=StepResult(
            step=4,
            weights=WeightsRef(version=3, uri="u", digest="d"),
            phases=(PhaseTime(phase=StepPhase.GENERATING, started=began, seconds=5.0),),
        ),
        transitions=({"at": began, "role": "rollout"},),
        retries=(RETRY,) if error else (),
    )


def test_an_attempt_that_gave_up_stays_on_record_when_the_step_is_done():
    done = after(a_record(10.0, "no engine answers"), a_record(60.0, None))
    assert done.error is None
    assert done.earlier == (GaveUp(error="no engine answers", began=10.0, ended=15.0),)
    assert [t["at"] for t in done.transitions] == [10.0, 60.0]
    assert done.retries == (RETRY,)


def test_a_third_attempt_knows_both_before_it():
    second = after(a_record(10.0, "one"), a_record(60.0, "two"))
    third = after(second, a_record(90.0, None))
    assert [each.error for each in third.earlier] == ["one", "two"]


def test_a_record_that_is_written_again_is_no_further_attempt():
    """The reply to its first writing was lost."""
    second = after(a_record(10.0, "one"), a_record(60.0, "two"))
    assert after(second, a_record(60.0, "two")).earlier == second.earlier
