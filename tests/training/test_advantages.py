"""Advantages against numbers worked out by hand, and against plain loops in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.training.advantages import (
    discounted_returns,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    token_advantages,
    token_rewards,
    whiten,
)
from tests.training.batches import batches, np_of

Made = dict[str, torch.Tensor]


def test_a_reward_is_measured_against_its_own_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0])
    groups = torch.tensor([7, 7, 7, 2, 2])
    advantages = group_advantages(rewards, groups, eps=0.0)
    # Group 7: mean 1/3, unbiased std 1/sqrt(3). Group 2: mean 4, unbiased std sqrt(2).
    wanted = [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 1 / 2**0.5, -1 / 2**0.5]
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-6)
    plain = group_advantages(rewards, groups, eps=0.0, normalise_std=False)
    assert plain.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1, -1], abs=1e-6)


def test_the_standard_deviation_is_that_of_torch() -> None:
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(4).repeat_interleave(8)
    centred = rewards - rewards.mean(1, keepdim=True)
    wanted = centred / (rewards.std(1, keepdim=True) + 1e-4)
    found = group_advantages(rewards.flatten(), groups, eps=1e-4)
    torch.testing.assert_close(found, wanted.flatten())


def test_a_unanimous_group_and_a_lonely_sample_teach_nothing() -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 4.0]), torch.tensor([0, 0, 0, 1])
    assert group_advantages(rewards, groups, eps=1e-4).tolist() == [0, 0, 0, 0]
    assert leave_one_out_advantages(rewards, groups).tolist() == [0, 0, 0, 0]


@given(batches())
def test_leaving_one_out_compares_with_the_mean_of_the_others(made: Made) -> None:
    rewards, groups = np_of(made["rewards"]), made["groups"].numpy()
    wanted = []
    for sample, reward in enumerate(rewards):
        others = [r for i, r in enumerate(rewards) if i != sample and groups[i] == groups[sample]]
        wanted.append(reward - np.mean(others) if others else 0.0)
    found = leave_one_out_advantages(made["rewards"], made["groups"])
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


@given(batches(), st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_returns_and_gae_are_those_of_a_plain_loop(made: Made, gamma: float, lam: float) -> None:
    mask, values = made["mask"], made["first"]
    rewards = token_rewards(made["rewards"], mask, kl=made["second"] + 3, coefficient=0.1)
    returns = discounted_returns(rewards, mask, gamma)
    advantages, targets = generalised_advantages(rewards, values, mask, gamma, lam)
    for row in range(len(mask)):
        kept = [t for t in range(mask.shape[1]) if mask[row, t]]
        paid = [-0.1 * (made["second"][row, t].item() + 3) for t in kept]
        if kept:
            paid[-1] += made["rewards"][row].item()
        value = [values[row, t].item() for t in kept] + [0.0]
        for place, token in enumerate(kept):
            rest = range(place, len(kept))
            wanted = sum(gamma ** (i - place) * paid[i] for i in rest)
            assert returns[row, token].item() == pytest.approx(wanted, abs=1e-4)
            delta = {i: paid[i] + gamma * value[i + 1] - value[i] for i in rest}
            wanted = sum((gamma * lam) ** (i - place) * delta[i] for i in rest)
            assert advantages[row, token].item() == pytest.approx(wanted, abs=1e-4)
            target = wanted + value[place]
            assert targets[row, token].item() == pytest.approx(target, abs=1e-4)
    for tensor in (returns, advantages, targets):
        assert not tensor[mask == 0].any()


def test_with_lambda_one_the_targets_are_the_returns() -> None:
    mask = torch.tensor([[0.0, 1, 1, 0, 1]])
    rewards = token_rewards(torch.tensor([2.0]), mask)
    _, targets = generalised_advantages(rewards, torch.randn(1, 5), mask, 0.9, 1.0)
    torch.testing.assert_close(targets, discounted_returns(rewards, mask, 0.9))


@given(batches())
def test_whitening_is_over_the_trained_tokens_alone(made: Made) -> None:
    values, mask = made["first"], made["mask"]
    kept = np_of(values)[np_of(mask) > 0]
    found = whiten(values, mask)
    assert not found[mask == 0].any()
    if len(kept) > 1:
        wanted = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(np_of(found)[np_of(mask) > 0], wanted, atol=1e-3)
        unshifted = np_of(whiten(values, mask, shift_mean=False))[np_of(mask) > 0]
        np.testing.assert_allclose(unshifted, wanted + kept.mean(), atol=1e-3)
    longer = [torch.cat([x, torch.zeros(len(x), 3)], 1) for x in (values, mask)]
    torch.testing.assert_close(whiten(*longer)[:, : mask.shape[1]], found)


def test_distillation_adds_the_teachers_preference_to_each_token() -> None:
    told = {
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
        "mask": torch.tensor([[1.0, 1.0, 0.0]]),
        "teacher_log_probs": torch.tensor([[-3.0, -1.0, 0.0]]),
        "coefficient": 0.25,
    }
    advantages = token_advantages(sample_advantages=torch.tensor([0.5]), **told)
    assert advantages.tolist() == [[0.5 - 0.5, 0.5 + 0.25, 0.0]]
    advantages = token_advantages(sample_advantages=torch.tensor([[0.5, 1.5, 9.0]]), **told)
    assert advantages.tolist() == [[0.5 - 0.5, 1.5 + 0.25, 0.0]]
