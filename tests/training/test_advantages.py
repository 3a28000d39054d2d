"""GRPO and distillation advantages, against numbers worked out by hand."""

import pytest
import torch

from relax_infer.training.advantages import group_advantages, token_advantages


def test_a_reward_is_measured_against_its_own_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0])
    groups = torch.tensor([7, 7, 7, 2, 2])
    advantages = group_advantages(rewards, groups, eps=0.0)
    # Group 7: mean 1/3, unbiased std 1/sqrt(3). Group 2: mean 4, unbiased std sqrt(2).
    wanted = [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 1 / 2**0.5, -1 / 2**0.5]
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-6)


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


def test_distillation_adds_the_teachers_preference_to_each_token() -> None:
    advantages = token_advantages(
        rollout_log_probs=torch.tensor([[-1.0, -2.0, 0.0]]),
        mask=torch.tensor([[1.0, 1.0, 0.0]]),
        sample_advantages=torch.tensor([0.5]),
        teacher_log_probs=torch.tensor([[-3.0, -1.0, 0.0]]),
        coefficient=0.25,
    )
    assert advantages.tolist() == [[0.5 - 0.5, 0.5 + 0.25, 0.0]]
