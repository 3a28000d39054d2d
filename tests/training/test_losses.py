"""The clipped loss token by token, how tokens add up, and importance weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.training.losses import aggregation_weights, importance_weights, policy_loss
from tests.training.batches import batches, np_of


def loss_of(log_ratio: float, advantage: float, dual_clip: float | None = None):
    log_probs = torch.tensor([[log_ratio - 1.0]], requires_grad=True)
    told = policy_loss(
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-1.0]]),
        advantages=torch.tensor([[advantage]]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=dual_clip,
    )
    told.loss.sum().backward()
    assert log_probs.grad is not None
    return told.loss.item(), told.clipped.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: d(-r A)/d(log r) = -r A
        (1.5, 2.0, -2.56, 0.0),  # a good token has risen far enough
        (0.5, 2.0, -1.0, -1.0),  # a good token has fallen: pull it back
        (0.5, -2.0, 1.6, 0.0),  # a bad token has fallen far enough
        (1.5, -2.0, 3.0, 3.0),  # a bad token has risen: push it down
    ],
)
def test_the_ratio_is_clipped_on_the_side_that_would_overshoot(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    found, clipped, slope = loss_of(math.log(ratio), advantage)
    assert found == pytest.approx(loss, abs=1e-5)
    assert slope == pytest.approx(gradient, abs=1e-5)
    assert clipped == (not 0.8 <= ratio <= 1.28)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # past the bound: no more than 3 * 2, and no pull
        (2.0, -2.0, 4.0, 4.0),  # below it: as without
        (5.0, 2.0, -2.56, 0.0),  # a good token is bounded by the clip alone
    ],
)
def test_the_dual_clip_bounds_what_a_bad_token_costs(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    found, _, slope = loss_of(math.log(ratio), advantage, dual_clip=3.0)
    assert found == pytest.approx(loss, abs=1e-5)
    assert slope == pytest.approx(gradient, abs=1e-5)


@given(batches())
def test_tokens_add_up_as_each_aggregation_says(made: dict[str, torch.Tensor]) -> None:
    mask, values = made["mask"], made["first"]
    rows = [v[m > 0] for v, m in zip(np_of(values), np_of(mask), strict=True)]
    rows = [row for row in rows if len(row)]
    wanted = {
        "token_mean": np.concatenate(rows).mean() if rows else 0.0,
        "sequence_mean": np.mean([row.mean() for row in rows]) if rows else 0.0,
        "sequence_sum": np.mean([row.sum() / 11 for row in rows]) if rows else 0.0,
    }
    for aggregation, value in wanted.items():
        weights, shares = aggregation_weights(mask, aggregation, 11)  # pyright: ignore[reportArgumentType]
        found = (values * weights).sum() / shares.sum().clamp(min=1)
        assert found.item() == pytest.approx(value, abs=1e-5)
        assert not weights[mask == 0].any()


@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@given(made=batches(), cap=st.floats(0.5, 5.0))
def test_importance_weights_are_capped_probability_ratios(
    correction: str, made: dict[str, torch.Tensor], cap: float
) -> None:
    mask, trainer, rollout = made["mask"], made["first"], made["second"]
    found = importance_weights(
        trainer_log_probs=trainer,
        rollout_log_probs=rollout,
        mask=mask,
        correction=correction,  # pyright: ignore[reportArgumentType]
        cap=cap,
    )
    wanted = np.ones(mask.shape)
    for row, kept in enumerate(np_of(mask) > 0):
        p, q = np.exp(np_of(trainer)[row]), np.exp(np_of(rollout)[row])
        if correction == "token":
            wanted[row, kept] = np.minimum(p / q, cap)[kept]
        elif correction == "sequence":
            wanted[row, kept] = min(np.prod(p[kept]) / np.prod(q[kept]), cap)
    np.testing.assert_allclose(np_of(found), wanted, rtol=1e-4)


def test_a_weight_that_would_overflow_is_the_cap() -> None:
    found = importance_weights(
        trainer_log_probs=torch.zeros(1, 3),
        rollout_log_probs=torch.full((1, 3), -80.0),
        mask=torch.ones(1, 3),
        correction="sequence",
        cap=2.0,
    )
    assert found.tolist() == [[pytest.approx(2.0)] * 3]
