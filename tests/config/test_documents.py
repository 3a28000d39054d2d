"""Recipes as YAML: what a person cannot have meant is refused with its place."""

from datetime import date
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from relax_infer.config import RecipeError, load_recipe, parse_overrides, read_recipe
from relax_infer.contracts.failures import PermanentError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\nname: b\n", "found name twice"),
        ("train: {learning_rate: 1, learning_rate: 2}\n", "found learning_rate twice"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
                for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "more than 100000 values",
        ),
        ("a: &a [*a]\n", "more than 100000 values"),
        ("[" * 5000, "more than 64 lists and mappings are in each other"),
        ("{a: " * 66 + "1" + "}" * 66, "more than 64 lists and mappings"),
        (f"seed: {'9' * 5000}\n", "is no int"),
        (f"seed: 1{':59' * 3000}\n", "has too many digits"),
        ("seed: 0x_\n", "'0x_' is no int"),
        ("seed: !!float many\n", "'many' is no float"),
        ("seed: !!bool perhaps\n", "'perhaps' is no bool"),
        ("seed: !!map many\n", "expected a mapping"),
        ("seed: !!binary aGk=\n", "has no values of kind"),
        ("seed: !!set {a}\n", "has no values of kind"),
        ("seed: !!timestamp never\n", "has no values of kind"),
        ('rollout: {model: "\\ud800"}\n', "half of a character"),
        ('"\\ud800": 1\n', "half of a character"),
        ("[1, 2]\n", "a recipe is a mapping"),
        ("", "a recipe is a mapping"),
        ('"": 1\n', "the input: no such field ''"),
        ('rollout: {"": 3}\n', "rollout: no such field ''"),
    ],
)
def test_a_document_that_nobody_would_write_is_refused(tmp_path: Path, text: str, words: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(PermanentError, match=words) as refused:
        load_recipe(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.learning_rate", float("inf")),
        ("train.grad_clip", float("inf")),
        ("train.weight_decay", float("nan")),
        ("distillation.coefficient", float("inf")),
        ("train.clip_high", float("inf")),
        ("rollout.sampling.temperature", float("inf")),
        ("train.betas", [0.9, float("nan")]),
        ("train.betas", [2.0, 0.9]),
        ("train.betas", [0.9]),
        ("rollout.engine.ray_gpu_fraction", 10**400),
        ("rollout.engine.server_args.page_size", float("nan")),
        ("data.config", {"size": float("nan")}),
        ("seed", 10**23),
        ("steps", 10**23),
        ("cluster.gpus", 10**9),
    ],
)
def test_numbers_beyond_all_measure_are_refused(key: str, value: float):
    with pytest.raises(PermanentError, match=key):
        load_recipe("quickstart", {key: value})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": {1: 2}}, "a has the key 1, which is no text"),
        ({"a": [date(2026, 1, 2)]}, "a.0 is a date, which JSON does not have"),
        ({"a": {"b": float("-inf")}}, "a.b is -inf, not a finite number"),
        ({"a": "\ud800"}, "a is no text"),
        (reduce(lambda inside, _: {"a": inside}, range(80), {}), "more than 64"),
    ],
)
def test_what_a_recipe_would_lose_on_its_way_to_a_run_is_refused(given: dict[str, Any], words: str):
    with pytest.raises(PermanentError, match=rf"data\.config: {words}"):
        load_recipe("quickstart", {"data.config": given})


def test_a_date_is_the_text_that_it_looks_like(tmp_path: Path):
    """A folder of that name was no text, and a day that no month has a traceback."""
    path = tmp_path / "mine.yaml"
    path.write_text("name: 2026-02-31\ncluster: {gpus: 2}\nrollout: {model: 2026-01-02}\n")
    read = read_recipe(path, parse_overrides(["genrm.model=2026-01-03"]))
    assert read.genrm is not None
    named = (read.name, read.rollout.model, read.genrm.model)
    assert named == ("2026-02-31", "2026-01-02", "2026-01-03")


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000, "0x_", "!!set {a}", "{a: 1, a: 2}"])
def test_the_value_of_an_override_is_read_as_a_recipe_is(value: str):
    with pytest.raises(RecipeError, match=r"--set seed=.*: the value is not YAML"):
        parse_overrides([f"seed={value}"])


def test_anchors_and_merges_of_a_usual_size_are_read(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ncluster: {gpus: 2}\n"
        "genrm: {model: 'tiny:genrm', engine: &engine {gpus_per_replica: 1}}\n"
        "rollout: {model: 'tiny:policy', engine: {<<: *engine, replicas: 2}}\n"
    )
    recipe = load_recipe(path)
    assert recipe.rollout.engine.replicas == 2
