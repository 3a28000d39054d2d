"""When the difference between the engines' and the trainer's log-probs is too much."""

import math

import pytest

from relax_infer.config import load_recipe
from relax_infer.config.load import RecipeError
from relax_infer.contracts.alarms import LogProbBound

BOTH = LogProbBound(mean=0.1, largest=2.0)


def test_what_is_within_both_bounds_is_fine():
    assert BOTH.breach(0.1, 2.0) is None
    assert BOTH.breach(0.1, None) is None  # an older trainer told no largest
    assert LogProbBound().breach(9.0, 9.0) is None


def test_each_bound_that_is_passed_is_named_with_its_value():
    assert BOTH.breach(0.05, 2.5) == (
        "rollout and trainer log-probs differ: largest 2.5 is above 2 (train.logprob_bound)"
    )
    words = BOTH.breach(0.2, 3.0) or ""
    assert "mean 0.2 is above 0.1, largest 3 is above 2" in words


def test_a_difference_that_is_no_number_is_past_every_bound():
    assert BOTH.breach(math.nan, 0.0) is not None


def test_recipes_warn_unless_they_say_otherwise():
    bound = load_recipe("quickstart").train.logprob_bound
    assert (bound.mean, bound.largest, bound.action) == (0.1, 0.0, "warn")
    overrides = {"train.logprob_bound.mean": 0, "train.logprob_bound.action": "pause"}
    changed = load_recipe("quickstart", overrides).train.logprob_bound
    assert (changed.mean, changed.action) == (0.0, "pause")
    with pytest.raises(RecipeError, match=r"train\.logprob_bound\.mean"):
        load_recipe("quickstart", {"train.logprob_bound.mean": -1})
