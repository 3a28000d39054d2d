"""Whose turn it is where steps overlap: bounds of staleness, order of training, no deadlock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.contracts.refs import WeightsRef
from workflows._turns import Turn, Turns


def weights(version: int) -> WeightsRef:
    return WeightsRef(version=version, uri=f"/weights/{version}", digest=f"d{version}")


def turns(staleness: int, version: int = 0) -> Turns:
    return Turns(staleness, weights(version))


def test_generation_is_never_further_ahead_than_allowed():
    book = turns(1)
    assert book.may("generate", 1)
    assert book.may("generate", 2)
    assert not book.may("generate", 3)
    book.give_back("sync", 1, weights(1))
    assert book.may("generate", 3)


def test_one_generates_at_a_time_and_nobody_while_weights_are_synced():
    book = turns(2)
    book.take("generate", 1)
    assert not book.may("generate", 2)
    assert not book.may("sync", 1)
    book.give_back("generate", 1)
    book.take("sync", 1)
    assert not book.may("generate", 2)


def test_weights_that_wait_go_before_the_next_generation():
    book = turns(2)
    book.take("generate", 2)
    book.ask("sync", 1)
    book.give_back("generate", 2)
    assert not book.may("generate", 3)
    assert book.may("sync", 1)


def test_a_step_trains_on_the_weights_of_the_one_before():
    book = turns(2)
    assert book.may("train", 1)
    assert not book.may("train", 2)
    book.take("train", 1)
    book.give_back("sync", 1, weights(1))
    assert not book.may("train", 2), "the first still has its turn"
    book.give_back("train", 1)
    assert book.may("train", 2)


def test_a_step_that_is_tried_again_finds_its_own_weights_in_the_engines():
    """It was trained and synced, and failed after that."""
    book = turns(1)
    book.give_back("sync", 1, weights(1))
    assert book.may("train", 1)


def test_a_turn_is_not_taken_out_of_turn_and_versions_only_grow():
    book = turns(1, version=3)
    with pytest.raises(ValueError, match="step 6 cannot generate now"):
        book.take("generate", 6)
    with pytest.raises(ValueError, match="versions only grow"):
        book.give_back("sync", 2, weights(2))


def test_a_step_that_ended_holds_and_wants_nothing():
    book = turns(1)
    book.take("generate", 1)
    book.ask("sync", 1)
    book.forget(1)
    assert book.may("generate", 2)


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_order_of_asking_ends_and_keeps_the_bounds(staleness: int, steps: int, chance):
    """pains 21: steps ask for their turns in any interleaving; all of them get to their end."""
    book = turns(staleness)
    order: list[Turn] = ["generate", "train", "sync"]
    at = dict.fromkeys(range(1, steps + 1), 0)
    holds: dict[int, Turn] = {}
    trained: list[int] = []
    while any(stage < 3 for stage in at.values()):
        able: list[int] = []
        for step, stage in at.items():
            committed = all(at[s] >= 1 and holds.get(s) != "generate" for s in range(1, step))
            if step in holds or (stage < 3 and committed):
                if step not in holds:
                    book.ask(order[stage], step)
                if step in holds or book.may(order[stage], step):
                    able.append(step)
        assert able, f"nobody can go on: {book}"
        step = chance.choice(able)
        if step not in holds:
            book.take(order[at[step]], step)
            holds[step] = order[at[step]]
            if holds[step] == "generate":
                assert step - 1 - book.weights.version <= staleness
            if holds[step] == "train":
                trained.append(step)
                at[step] += 1  # keeps its turn until its weights are synced
                del holds[step]
        else:
            turn = holds.pop(step)
            if turn == "sync":
                book.give_back("train", step)
                book.give_back("sync", step, weights(step))
            else:
                book.give_back(turn, step)
            at[step] += 1
    assert trained == list(range(1, steps + 1))
    assert book.weights.version == steps
