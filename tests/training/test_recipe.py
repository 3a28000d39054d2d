"""The algorithm in the recipe: what is refused and why, and what reaches the trainer."""

from pathlib import Path
from typing import Any

import pytest

from activities import recipes
from activities.recipes import resolve_recipe
from relax_infer.config import RecipeError, load_recipe, read_recipe, require_runnable
from relax_infer.contracts.run import ResolveRequest, RunInput
from relax_infer.placement import PlacementError, plan_inference_placement


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"train.algorithm.estimator": "gae"},
            r"estimator: must be one of grpo, rloo",
        ),
        ({"train.algorithm.dual_clip": 1.0}, r"train\.algorithm\.dual_clip: .*greater than 1"),
        ({"train.algorithm.gamma": 0}, r"train\.algorithm\.gamma"),
        ({"train.algorithm.clip": 0.2}, r"train\.algorithm\.clip: no such field"),
        (
            {"train.algorithm.importance": "token"},
            "importance: is token but old_log_probs is rollout: .* Set old_log_probs to trainer",
        ),
        (
            {"train.algorithm.kl_coefficient": 0.1, "train.algorithm.kl_estimator": "k1"},
            "k1 has no gradient as a loss",
        ),
        (
            {"distillation.divergence": "forward_kl"},
            "divergence is forward_kl but mode is student_sampled",
        ),
        (
            {"train.schedule.style": "cosine", "train.schedule.warmup_steps": 40, "steps": 40},
            "warmup_steps: 40, but the learning rate is to have fallen at step 40",
        ),
        (
            {"train.schedule.min_learning_rate": 1.0},
            "min_learning_rate: 1 is above train.learning_rate",
        ),
        (
            {"train.ranks": 3, "train.tensor_parallel": 2},
            r"train\.ranks: is 3, tensor_parallel x .* is 2",
        ),
        (
            {"train.sequence_parallel": True},
            r"sequence_parallel: needs train\.tensor_parallel above 1",
        ),
        ({"train.precision": "fp16"}, r"train\.precision: must be one of fp32, bf16"),
    ],
)
def test_what_does_not_fit_together_is_said_with_its_field(
    overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe("quickstart", overrides)


def test_the_rules_of_the_trainer_are_told_together_with_all_others() -> None:
    """One of them ended the reading before anything else was looked at."""
    wrong = {
        "train.ranks": 9,
        "train.pipeline_parallel": 2,
        "train.sequence_parallel": True,
        "train.algorithm.importance": "token",
        "train.algorithm.kl_coefficient": 0.1,
        "train.algorithm.kl_estimator": "k1",
        "max_staleness": 1,
    }
    with pytest.raises(PlacementError) as refused:
        plan_inference_placement(read_recipe("quickstart", wrong))
    found = refused.value.violations
    assert {
        *("train.ranks", "train.sequence_parallel", "train.algorithm.importance"),
        *("train.algorithm.kl_estimator", "max_staleness"),
    } == {violation.field for violation in found}
    assert sum(violation.field == "train.ranks" for violation in found) == 2
    settings = dict(setting for violation in found for setting in violation.settings)
    assert plan_inference_placement(load_recipe("quickstart", wrong | settings))


async def test_a_run_carries_the_algorithm_to_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    overrides = {
        "rollout.model": str(tmp_path),
        "genrm": None,
        "reward.source": "exact",
        "cluster.device": "cpu",
        "distillation": None,
        "rollout.sampling.max_new_tokens": 7,
        "train.algorithm.estimator": "reinforce_plus_plus",
        "train.algorithm.kl_coefficient": 0.01,
        "train.schedule.style": "linear",
        "train.precision": "bf16",
        "lease.residual_gib": 2.5,
    }
    start = RunInput(recipe="quickstart", overrides=overrides, steps=9)
    plan = await resolve_recipe(ResolveRequest(run="run-1", start=start))
    trainer = plan.trainer
    assert trainer.algorithm.estimator == "reinforce_plus_plus"
    assert trainer.algorithm.needs_reference
    assert (trainer.schedule.style, trainer.schedule.decay_steps) == ("linear", 9)
    assert (trainer.longest_response, trainer.precision) == (7, "bf16")
    assert {spec.residual_memory for spec in (trainer, *plan.groups)} == {2_684_354_560}


async def test_ppo_trains_a_critic_on_the_trainers_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_HOME", str(tmp_path))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    overrides = {
        "rollout.model": str(tmp_path),
        "genrm": None,
        "reward.source": "exact",
        "cluster.device": "cpu",
        "distillation": None,
        "train.algorithm.estimator": "ppo",
        "critic": {"ranks": 1, "learning_rate": 0.01},
    }
    start = RunInput(recipe="quickstart", overrides=overrides)
    trainer = (await resolve_recipe(ResolveRequest(run="run-1", start=start))).trainer
    assert trainer.critic is not None
    assert (trainer.critic.learning_rate, trainer.critic.value_clip) == (0.01, 0.2)


def test_a_critic_that_nothing_uses_or_that_has_ranks_of_its_own_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"only train\.algorithm\.estimator ppo uses one"):
        require_runnable(load_recipe("quickstart", {"critic": {"ranks": 1}}))
    ppo = {"train.algorithm.estimator": "ppo"}
    with pytest.raises(RecipeError, match="trainer's own 1 rank"):
        require_runnable(load_recipe("quickstart", {**ppo, "critic": {"ranks": 2}}))
    with pytest.raises(RecipeError, match="estimator: ppo, but the recipe has no critic section"):
        load_recipe("quickstart", ppo)
