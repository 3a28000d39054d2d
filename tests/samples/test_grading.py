"""Graders in a process of their own."""

import sys
from collections.abc import Iterator

import pytest

from relax_infer.contracts.failures import PermanentError
from relax_infer.samples import Unscored
from relax_infer.samples.grading import Grader


@pytest.fixture(scope="module")
def math() -> Iterator[Grader]:
    made = Grader("math_verify")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("1/2", r"so it is $\frac{1}{2}$", 1.0),
        (r"\frac{1}{2}", "the answer is 0.5", 1.0),
        ("12", r"\boxed{12}", 1.0),
        ("12", r"\boxed{13}", 0.0),
        ("12", "no number at all", 0.0),
        ("12", "", 0.0),
        ("x^2+1", r"$1 + x^2$", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
    ],
)
def test_math_verify_compares_what_expressions_mean(
    math: Grader, answer: str, text: str, score: float
):
    assert math.grade({"answer": answer, "text": text}) == score


def test_a_right_answer_that_cannot_be_parsed_is_no_wrong_response(math: Grader):
    """Pains 9 and 10: there is no score, it is not 0."""
    with pytest.raises(Unscored, match="the right answer cannot be parsed"):
        math.grade({"answer": "", "text": "12"})


def test_a_response_that_takes_too_long_has_no_score_and_the_next_one_has():
    grader = Grader("math_verify", timeout=3)
    try:
        assert grader.grade({"answer": "2", "text": "2"}) == 1.0
        first = grader._process
        with pytest.raises(Unscored, match="math_verify could not grade"):
            grader.grade({"answer": "2", "text": "$9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 2$"})
        assert grader.grade({"answer": "2", "text": "2"}) == 1.0
        assert grader._process is not first
        assert first is not None
        assert first.poll() is not None
    finally:
        grader.close()


def test_a_grader_that_died_of_a_response_has_no_score_for_it():
    grader = Grader("math_verify")
    try:
        grader.grade({"answer": "2", "text": "2"})
        assert grader._process is not None
        grader._process.kill()
        grader._process.wait()
        grader._started = lambda: grader._process  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(Unscored, match="could not grade"):
            grader.grade({"answer": "2", "text": "2"})
    finally:
        grader.close()


def test_a_grader_that_does_not_start_is_no_fault_of_the_response(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PermanentError, match="math_verify does not start") as error:
        Grader("math_verify").grade({"answer": "2", "text": "2"})
    assert "Is math-verify installed" in error.value.cure
