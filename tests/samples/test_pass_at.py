"""pass@k against the definition: every choice of k samples, counted."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.samples.pass_at import pass_at_k, standard_error


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_it_is_the_share_of_choices_that_hold_a_right_answer(counts: tuple[int, int]):
    samples, right = counts
    answers = [k < right for k in range(samples)]
    for k in range(1, samples + 1):
        choices = list(combinations(answers, k))
        assert pass_at_k(samples, right, k) == pytest.approx(
            sum(map(any, choices)) / len(choices), abs=1e-12
        )


def test_with_one_answer_it_is_the_accuracy_and_with_all_of_them_whether_any_is_right():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert [pass_at_k(10, right, 10) for right in (0, 1, 10)] == [0.0, 1.0, 1.0]


def test_many_samples_are_no_trouble():
    """The binomials have thousands of digits; their ratio has not."""
    assert pass_at_k(10_000, 10, 1000) == pytest.approx(1 - 0.9**10, abs=1e-3)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_cannot_be_counted_is_refused(samples: int, right: int, k: int):
    with pytest.raises(ValueError, match=f"pass@{k} of {samples} samples"):
        pass_at_k(samples, right, k)


def test_the_standard_error_is_over_problems():
    assert standard_error([0.0, 1.0, 0.0, 1.0]) == pytest.approx((1 / 3) ** 0.5 / 2)
    assert standard_error([1.0]) is None
