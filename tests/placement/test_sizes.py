"""Sizes at the end of their ranges: what no cluster has, and cures that stay within."""

from typing import Any

import pytest

from relax_infer.config import RecipeError, read_recipe
from relax_infer.placement import PlacementError, plan_inference_placement
from tests.placement.recipes import document, engine, plan, read, refused, slices
from tests.placement.test_rejections import extra


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"rollout__engine__replicas": 1 << 20, "rollout__engine__gpus_per_replica": 8}, "rollout"),
        ({"mode": "decoupled", "rollout__engine__replicas": (1 << 20) - 1}, "rollout"),
        ({"reference": {"ranks": 1 << 20}}, "reference.ranks"),
    ],
)
def test_what_no_cluster_has_is_refused_without_laying_it_out(
    overrides: dict[str, Any], field: str
) -> None:
    found = refused(document(rollout=engine(4)), **overrides)
    assert found[0].field.startswith(field)
    assert "a cluster has 1048576 at most" in found[0].rule
    assert all(v.rule.startswith("once the others are cured: ") for v in found[1:])


@pytest.mark.parametrize("mode", ["defer", "split"])
def test_what_is_never_on_gpus_together_may_be_more_than_a_cluster_together(mode: str) -> None:
    roles = document(mode, 1 << 20, rollout=engine(600_000, 8), genrm=engine(600_000, 8), ranks=8)
    if mode == "defer":
        assert slices(plan(roles))[1] == ("genrm", "judge", 0, 600_000)
        return
    (found,) = refused(roles)
    assert "it alone makes 600000 GPUs, all at the same time 1200000" in found.rule
    assert found.settings == (("rollout.engine.replicas", 56_072),)
    assert plan(roles, rollout__engine__replicas=56_072).total_required_gpus == 1 << 20


@pytest.mark.parametrize(
    ("recipe", "node", "overrides"),
    [
        (document(gpus=1 << 20, rollout=engine(1 << 19, 1 << 19), ranks=1 << 20), 8, {}),
        *(
            (recipe, node, {})
            for node in (8, 1000)
            for recipe in (
                document(
                    *("decoupled", 1 << 20), rollout={"gpus_per_replica": (1 << 20) - 1}, ranks=1
                ),
                document("split", rollout=engine(1 << 20, 8), genrm={"gpus_per_replica": 1 << 20}),
            )
        ),
        (
            document(
                *("decoupled", 1 << 20),
                ranks=(1 << 20) - 16,
                rollout=engine(3, 3),
                teacher=engine(8, 8),
            ),
            8,
            {"rollout__extra_models": [extra("second", gpus_per_replica=8)]},
        ),
        (document("decoupled", 1 << 20, ranks=8), 8, {"rollout__num_gpus": 1 << 20}),
        (document(), 8, {"rollout__prompts_per_step": 1 << 53, "rollout__samples_per_prompt": 99}),
        (document(), 8, {"rollout__sampling__max_new_tokens": 1 << 53}),
        (
            document(teacher=engine(1)),
            8,
            {"distillation": {"mode": "student_topk", "top_k": 1 << 53}},
        ),
    ],
)
def test_a_cure_is_within_the_range_of_its_field(
    recipe: dict[str, Any], node: int, overrides: dict[str, Any]
) -> None:
    large = overrides | {"cluster__gpus_per_node": node, "reference": {"ranks": 5}}
    read_as = {key.replace("__", "."): value for key, value in large.items()}
    with pytest.raises(PlacementError) as caught:
        plan_inference_placement(read_recipe(recipe, read_as))
    cures = dict(setting for v in caught.value.violations for setting in v.settings)
    assert plan_inference_placement(read_recipe(recipe, read_as | cures))


@pytest.mark.parametrize("size", [0, (1 << 20) + 1])
@pytest.mark.parametrize(
    "field", ["cluster__gpus_per_node", "rollout__engine__replicas", "train__ranks"]
)
def test_a_count_out_of_range_is_no_recipe(field: str, size: int) -> None:
    with pytest.raises(RecipeError, match=field.replace("__", ".")):
        read(document(), **{field: size})
