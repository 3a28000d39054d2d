"""Numbers and switches are what they look like: true is no rank, "8" no number of GPUs."""

from pathlib import Path
from typing import Any

import pytest

from relax_infer.cli._recipes import check
from relax_infer.config import Recipe, RecipeError, load_recipe, parse_overrides

EXTRA = {"model": "m", "model_id": "b", "engine": {"replicas": "2"}}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("train.ranks", True, "must be a whole number, got True"),
        ("rollout.engine.replicas", True, "must be a whole number, got True"),
        ("cluster.gpus", "8", "must be a whole number, got '8'"),
        ("cluster.gpus_per_node", False, "must be a whole number, got False"),
        ("train.offload", "no", "must be true or false, got 'no'"),
        ("train.offload", 1, "must be true or false, got 1"),
        ("data.shuffle", 0.0, "must be true or false, got 0.0"),
        ("train.learning_rate", True, "must be a number, got True"),
        ("train.learning_rate", "0.1", "must be a number, got '0.1'"),
        ("train.betas", [0.9, True], "must be a number, got True"),
        ("train.algorithm.gamma", True, "must be a number, got True"),
        ("train.algorithm.normalise_std", "yes", "must be true or false, got 'yes'"),
        ("train.weights.bucket_mb", "256", "must be a number, got '256'"),
        ("train.logprob_bound.mean", False, "must be a number, got False"),
        ("train.schedule.warmup_steps", True, "must be a whole number, got True"),
        (
            "genrm.extra_models",
            [{"model": "m", "model_id": "b", "engine": {"replicas": "2"}}],
            "'2'",
        ),
        ("reward.combine.weights", {"judge": True}, "must be a number, got True"),
        ("evaluation.sets", [{"name": "a", "samples": True}], "must be a whole number, got True"),
        (
            "evaluation.sets",
            [{"name": "a", "samples": 2, "temperature": 1, "pass_at": [1, True]}],
            "must be a whole number, got True",
        ),
    ],
)
def test_what_is_no_number_or_no_switch_is_refused_by_its_field(key: str, value: Any, says: str):
    with pytest.raises(RecipeError) as refused:
        load_recipe("quickstart", {key: value})
    assert key in str(refused.value)
    assert says in str(refused.value)
    assert ";" not in str(refused.value)


def test_whole_numbers_are_numbers_and_numbers_may_be_written_as_powers(tmp_path: Path):
    recipe = load_recipe(
        "quickstart",
        {"train.grad_clip": 2, "steps": 1e3, "train.learning_rate": "1e-4", "train.betas": [0, 0]},
    )
    assert (recipe.train.grad_clip, recipe.steps, recipe.train.learning_rate) == (2.0, 1000, 1e-4)
    assert load_recipe("quickstart", {"rollout.engine.ray_gpu_fraction": "auto"})
    args = {"watchdog_timeout": "8", "enable_metrics": True, "schedule_conservativeness": 1}
    engine = load_recipe("quickstart", {"rollout.engine.server_args": args}).rollout.engine
    assert engine.server_args == args
    written = recipe.model_dump_json()
    assert Recipe.model_validate_json(written) == recipe
    path = tmp_path / "mine.yaml"
    path.write_text(recipe.model_dump_json().replace("0.0001", '"1e-4"'))
    assert load_recipe(path) == recipe


def test_what_is_set_on_the_command_line_is_read_as_yaml():
    given = parse_overrides(['cluster.gpus="8"', "train.offload='no'", "steps=1e2", "name=inf"])
    assert given == {"cluster.gpus": "8", "train.offload": "no", "steps": 100.0, "name": "inf"}
    assert check("quickstart", ["train.offload=yes", "steps=1e2"]).recipe.steps == 100


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"lora_paths": ["a"]}, "lora_paths: must be a text, a number, or true or false, got"),
        (
            {"a": {"b": 1}, "c": []},
            "a: must be a text, a number, or true or false, got {'b': 1}",
        ),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_one_fault(args: dict[str, Any], says: str):
    """It was one for each kind, under names that no recipe has, such as lora_paths.int."""
    with pytest.raises(RecipeError) as refused:
        load_recipe("quickstart", {"rollout.engine.server_args": args})
    assert f"rollout.engine.server_args.{says}" in str(refused.value)
    fields = [violation.field for violation in refused.value.violations]
    assert fields == [f"rollout.engine.server_args.{flag}" for flag in args]
