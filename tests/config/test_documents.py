"""Recipes as YAML: what a person cannot have meant is refused with its place."""

from pathlib import Path

import pytest

from relax_infer.config import load_recipe
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
        ("steps", 10**23),
        ("cluster.gpus", 10**9),
    ],
)
def test_numbers_beyond_all_measure_are_refused(key: str, value: float):
    with pytest.raises(PermanentError, match=key):
        load_recipe("quickstart", {key: value})


def test_anchors_and_merges_of_a_usual_size_are_read(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\ncluster: {gpus: 2}\n"
        "genrm: {model: 'tiny:genrm', engine: &engine {gpus_per_replica: 1}}\n"
        "rollout: {model: 'tiny:policy', engine: {<<: *engine, replicas: 2}}\n"
    )
    recipe = load_recipe(path)
    assert recipe.rollout.engine.replicas == 2
