"""KL estimates, entropy, log-probs of chosen tokens, and divergences from the Teacher."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from relax_infer.training.distillation import support_divergence
from relax_infer.training.kl import kl_estimate
from relax_infer.training.values import value_loss
from relax_infer.training.vocabulary import entropy, log_probs_at
from tests.training.batches import np_of


def logits(seed: int, *shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_an_estimate_has_the_kl_as_its_mean_over_what_the_policy_samples(estimator: str) -> None:
    policy, reference = (logits(seed, 9).double().log_softmax(-1) for seed in (1, 2))
    each = kl_estimate(policy, reference, estimator)  # pyright: ignore[reportArgumentType]
    wanted = F.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * each).sum().item() == pytest.approx(wanted.item(), abs=1e-9)
    assert estimator == "k1" or (each >= 0).all()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_estimates_and_their_slopes(estimator: str, value: float, slope: float) -> None:
    log_prob = torch.tensor(-1.0, requires_grad=True)
    found = kl_estimate(log_prob, torch.tensor(-1.5), estimator)  # pyright: ignore[reportArgumentType]
    found.backward()
    assert found.item() == pytest.approx(value, abs=1e-6)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_gradient_of_k2_is_that_of_the_kl_in_expectation() -> None:
    scores = logits(3, 9).double().requires_grad_()
    reference = logits(4, 9).double().log_softmax(-1)
    policy = scores.log_softmax(-1)
    F.kl_div(reference, policy, log_target=True, reduction="sum").backward()
    assert scores.grad is not None
    wanted, scores.grad = scores.grad, None
    policy = scores.log_softmax(-1)
    (policy.detach().exp() * kl_estimate(policy, reference, "k2")).sum().backward()
    torch.testing.assert_close(scores.grad, wanted)


def test_entropy_and_its_gradient_are_those_of_autograd() -> None:
    ours = logits(5, 3, 4, 11).requires_grad_()
    plain = ours.detach().double().requires_grad_()
    upstream = torch.rand(3, 4)
    (entropy(ours) * upstream).sum().backward()
    log_probs = plain.log_softmax(-1)
    wanted = -(log_probs.exp() * log_probs).sum(-1)
    (wanted * upstream).sum().backward()
    torch.testing.assert_close(entropy(ours).double(), wanted, atol=1e-5, rtol=0)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=1e-5, rtol=0)


def test_an_impossible_token_does_not_spoil_the_entropy() -> None:
    scores = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    found = entropy(scores)
    found.backward()
    assert found.item() == pytest.approx(math.log(2))
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_log_probs_of_chosen_tokens_and_their_gradient_are_those_of_autograd() -> None:
    ours = logits(6, 3, 4, 11).requires_grad_()
    plain = ours.detach().double().requires_grad_()
    ids = torch.randint(0, 11, (3, 4, 5))  # with repetitions
    upstream = torch.rand(3, 4, 5)
    (log_probs_at(ours, ids) * upstream).sum().backward()
    wanted = plain.log_softmax(-1).gather(-1, ids)
    (wanted * upstream).sum().backward()
    torch.testing.assert_close(log_probs_at(ours, ids).double(), wanted, atol=1e-5, rtol=0)
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.double(), plain.grad, atol=1e-5, rtol=0)


def naive(student: np.ndarray, teacher: np.ndarray, divergence: str) -> float:
    """Of two probability vectors that include the rest."""

    def kl(p: np.ndarray, q: np.ndarray) -> float:
        return float(np.sum(p * np.log(p / q)))

    if divergence == "reverse_kl":
        return kl(student, teacher)
    if divergence == "forward_kl":
        return kl(teacher, student)
    middle = (student + teacher) / 2
    return kl(student, middle) / 2 + kl(teacher, middle) / 2


DIVERGENCES = ["reverse_kl", "forward_kl", "jensen_shannon"]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 6), missing=st.integers(0, 3))
def test_the_divergence_is_over_the_support_and_one_event_for_the_rest(
    divergence: str, seed: int, width: int, missing: int
) -> None:
    policy, teacher = (logits(seed + n, 12).log_softmax(-1) for n in (0, 1))
    ids = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:width]
    filled = torch.cat([ids, torch.zeros(missing, dtype=torch.int64)])
    present = torch.arange(width + missing) < width
    found = support_divergence(policy[filled], teacher[filled], present, divergence)  # pyright: ignore[reportArgumentType]
    whole = [np.exp(np_of(each)) for each in (policy, teacher)]
    binned = [np.append(p[ids.numpy()], 1 - p[ids.numpy()].sum()) for p in whole]
    assert found.item() == pytest.approx(naive(*binned, divergence), abs=2e-5)
    assert -1e-6 <= found.item() <= naive(*whole, divergence) + 2e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_its_gradient_is_that_of_the_plain_formula_and_leads_to_the_teacher(
    divergence: str,
) -> None:
    scores = logits(7, 5, 12).requires_grad_()
    teacher = logits(8, 5, 12).log_softmax(-1)
    ids = teacher.topk(4).indices
    present = torch.ones(5, 4, dtype=torch.bool)
    at = teacher.gather(-1, ids)

    def ours() -> torch.Tensor:
        found = support_divergence(log_probs_at(scores, ids), at, present, divergence)  # pyright: ignore[reportArgumentType]
        return found.sum()

    ours().backward()
    plain = scores.detach().double().requires_grad_()
    p = plain.softmax(-1).gather(-1, ids)
    p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
    t = at.double().exp()
    t = torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1)
    m = (p + t) / 2
    terms = {
        "reverse_kl": (p * (p / t).log()).sum(),
        "forward_kl": (t * (t / p).log()).sum(),
        "jensen_shannon": ((p * (p / m).log()).sum() + (t * (t / m).log()).sum()) / 2,
    }
    terms[divergence].backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad.double(), plain.grad, atol=1e-5, rtol=0)

    optimizer = torch.optim.Adam([scores], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        ours().backward()
        optimizer.step()
    assert ours().item() < 1e-3
    reached = scores.detach().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(reached, at, atol=0.1, rtol=0)


def test_a_support_of_the_whole_vocabulary_leaves_a_finite_rest() -> None:
    scores = logits(9, 6).requires_grad_()
    ids, present = torch.arange(6), torch.ones(6, dtype=torch.bool)
    teacher = logits(10, 6).log_softmax(-1)
    found = support_divergence(log_probs_at(scores, ids), teacher, present, "reverse_kl")
    found.backward()
    whole = F.kl_div(teacher, scores.log_softmax(-1), log_target=True, reduction="sum")
    assert found.item() == pytest.approx(whole.item(), abs=1e-4)
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_a_position_without_entries_has_no_divergence() -> None:
    absent = torch.zeros(2, 3, dtype=torch.bool)
    student = torch.randn(2, 3, requires_grad=True)
    found = support_divergence(student, torch.randn(2, 3), absent, "reverse_kl")
    found.sum().backward()
    assert found.tolist() == [0, 0]
    assert student.grad is not None
    assert not student.grad.any()


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.1, 0.405, -0.9),  # near the old value: plain squared error
        (0.5, 0.32, 0.0),  # moved further than allowed towards the return: no more pull
        (-0.5, 1.125, -1.5),  # moved away from it: the unclipped error is worse and counts
    ],
)
def test_a_value_is_moved_a_bounded_way_towards_its_return(
    value: float, loss: float, slope: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.tensor([0.0]), torch.tensor([1.0]), clip=0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-6)
