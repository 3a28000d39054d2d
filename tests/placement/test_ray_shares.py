"""What actors reserve with Ray: given or computed, and never above one GPU."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from relax_infer.config import RecipeError
from relax_infer.contracts.fractions import GpuFraction
from tests.placement.recipes import document, engine, plan, read, refused

GRPO = document(rollout=engine(8, 2), genrm=engine(8, 4), teacher=engine(8, 8))
PPO = GRPO | {"critic": {"ranks": 8}}
SPLIT = document("split", rollout=engine(4), genrm=engine(2), teacher=engine(2))
AUTO = {f"{role}__engine__ray_gpu_fraction": "auto" for role in ("rollout", "genrm", "teacher")}


def test_grpo_with_three_inference_roles_reserves_exactly_one_gpu() -> None:
    assert {p.ray_gpu_fraction for p in plan(GRPO).placements} == {0.2}


def test_ppo_in_turns_is_refused_with_every_claim() -> None:
    found = refused(document(rollout=engine(8), teacher=engine(8, 8)), critic={"ranks": 8})
    assert "bundle 0 would reserve 1.2" in found[0].rule
    assert "trainer=0.4 critic=0.4 rollout/policy=0.2 teacher/teacher=0.2" in found[0].rule
    assert len(found) == 1  # the other bundles hold 0.4 + 0.4 + 0.2


def test_ppo_in_turns_is_placed_with_computed_shares() -> None:
    made = plan(PPO, **AUTO)
    assert {p.ray_gpu_fraction for p in made.placements} == {0.0666}  # 0.2 / 3 in steps of 1e-4
    assert {p.ray_gpu_fraction for p in plan(GRPO, **AUTO).placements} == {0.2}


def test_only_the_shares_that_ask_for_it_are_computed() -> None:
    made = plan(PPO, **{**AUTO, "rollout__engine__ray_gpu_fraction": 0.1})
    assert [p.ray_gpu_fraction for p in made.placements] == [0.1, 0.05, 0.05]
    full = plan(GRPO, **AUTO, train__ray_gpu_fraction=1.0)
    assert {p.ray_gpu_fraction for p in full.placements} == {0.0}


def test_a_judge_beside_the_rollout_reserves_as_much_as_anywhere() -> None:
    """Contract 8.4 has 0.1 there by itself; here it is said, or computed."""
    roles = document("split", rollout=engine(4), genrm=engine(4), ranks=4)
    beside = "rollout + genrm -> actor"
    assert {p.ray_gpu_fraction for p in plan(roles, layout=beside).placements} == {0.2}
    (_, judge) = plan(roles, layout=beside, genrm__engine__ray_gpu_fraction=0.1).placements
    assert judge.ray_gpu_fraction == 0.1


def test_ppo_side_by_side_is_placed_since_heads_are_apart() -> None:
    assert plan(SPLIT, critic={"ranks": 8}).mode == "split"


def test_a_share_is_refused_on_the_bundle_where_it_is_too_much() -> None:
    (found,) = refused(SPLIT, genrm__engine__ray_gpu_fraction=0.7)
    assert "bundle 4 and 1 more would reserve 1.1" in found.rule
    assert "trainer=0.4 genrm/judge=0.7" in found.rule
    assert plan(SPLIT, genrm__engine__ray_gpu_fraction=0.6)
    assert plan(SPLIT, genrm__engine__ray_gpu_fraction=0)


def test_each_node_of_an_engine_has_a_head_that_reserves() -> None:
    wide = document(gpus=16, rollout=engine(16, 16, ray_gpu_fraction=0.7))
    (found,) = refused(wide)
    assert found.rule.startswith("bundle 0 and 1 more would reserve 1.1")


@pytest.mark.parametrize("share", [True, "0.2", None, float("nan"), float("inf"), -0.1, 1.1, [0.2]])
def test_planner_and_actors_refuse_the_same_shares_with_the_same_words(share: Any) -> None:
    with pytest.raises(ValidationError) as by_actor:
        TypeAdapter(GpuFraction).validate_python(share)
    recipe = document(genrm=engine(1, ray_gpu_fraction=share))
    with pytest.raises(RecipeError) as by_recipe:
        read(recipe)
    words = "a share of one GPU must be a finite number from 0 to 1"
    assert words in str(by_actor.value)
    assert f"genrm.engine.ray_gpu_fraction: {words}" in str(by_recipe.value)


@pytest.mark.parametrize("share", [0, 1, 0.25])
def test_planner_and_actors_accept_the_same_shares(share: float) -> None:
    assert TypeAdapter(GpuFraction).validate_python(share) == share
    assert read(document(genrm=engine(1, ray_gpu_fraction=share)))
