"""The clipped loss, token by token."""

import math

import pytest
import torch

from relax_infer.training.losses import TokenLoss, clipped_loss


def loss_of(log_ratio: float, advantage: float, mask: float = 1.0) -> tuple[TokenLoss, float]:
    log_probs = torch.tensor([[log_ratio - 1.0]], requires_grad=True)
    told = clipped_loss(
        log_probs=log_probs,
        rollout_log_probs=torch.tensor([[-1.0]]),
        advantages=torch.tensor([[advantage]]),
        mask=torch.tensor([[mask]]),
        clip_low=0.2,
        clip_high=0.28,
    )
    told.loss.backward()
    assert log_probs.grad is not None
    return told, log_probs.grad.item()


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
    told, found = loss_of(math.log(ratio), advantage)
    assert told.loss.item() == pytest.approx(loss, abs=1e-5)
    assert found == pytest.approx(gradient, abs=1e-5)
    assert told.clipped.item() == (1 if not 0.8 <= ratio <= 1.28 else 0)


def test_a_masked_token_counts_for_nothing() -> None:
    told, gradient = loss_of(math.log(1.1), 2.0, mask=0.0)
    sums = (told.loss.item(), told.tokens.item(), told.clipped.item(), told.kl.item())
    assert sums == (0, 0, 0, 0)
    assert gradient == 0


def test_the_drift_is_rollout_minus_trainer_log_prob() -> None:
    told, _ = loss_of(0.25, 1.0)
    assert told.kl.item() == pytest.approx(-0.25)
