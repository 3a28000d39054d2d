"""What fails before anything starts: placements that cannot be, combinations that no run has."""

from typing import Any

import pytest

from activities.recipes import resolve_recipe
from relax_infer.config import RecipeError, load_recipe, require_runnable
from relax_infer.contracts.run import ResolveRequest, RunInput
from relax_infer.placement import PlacementError, plan_inference_placement
from tests.placement.recipes import document, engine, plan, refused

ALL = {"genrm": engine(2), "teacher": engine(2)}


async def refused_as_a_run(recipe: dict[str, Any], tmp_path: Any, patch: Any) -> str:
    """Why a run of it ends as it reads the recipe: there is no store, and nothing else yet."""
    patch.setenv("RELAX_HOME", str(tmp_path))
    start = RunInput.model_validate({"recipe": recipe})
    with pytest.raises((PlacementError, RecipeError)) as error:
        await resolve_recipe(ResolveRequest(run="run-1", start=start))
    assert not (tmp_path / "store").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (document("split", rollout=engine(6), genrm=engine(4)), "Combined inference needs 10 GPUs"),
        (
            document("split", rollout=engine(4), teacher=engine(4), genrm=engine(2)),
            "Combined inference needs 10 GPUs",
        ),
        (document(**ALL, defer_roles=["rollout"]), "Only GenRM and Teacher can be deferred"),
        (document(defer_roles=["teacher"]), "deferred Teacher without distillation"),
        (document(defer_roles=["genrm"]), "deferred GenRM without a GenRM"),
        (document("split", **ALL, defer_roles=["genrm"]), "mode defer only, this is split"),
        (document("decoupled", 32, ranks=8, **ALL, defer_roles=["genrm"]), "this is decoupled"),
    ],
)
async def test_overlapping_splits_and_invalid_defer_schedules_fail_before_start(
    recipe: dict[str, Any], says: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(says in violation.rule for violation in refused(recipe))
    assert says in await refused_as_a_run(recipe, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "recipe",
    [
        document("split", rollout=engine(8), genrm=engine(8, 4)),
        document(rollout=engine(8), genrm=engine(8, 4), defer_roles=[]),
    ],
)
async def test_co_resident_layouts_fail_before_start(
    recipe: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same GPUs for two roles in the same phase; in turns they may share them."""
    says = "Same-phase Rollout and GenRM"
    assert any(says in violation.rule for violation in refused(recipe))
    assert says in await refused_as_a_run(recipe, tmp_path, monkeypatch)
    assert plan(recipe | {"mode": "defer", "defer_roles": None})


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"max_staleness": 1}, "max_staleness: 1 in mode defer"),
        ({"debug": "train_only"}, "debug: is not used by runs"),
        ({"debug": "rollout_only"}, "debug: is not used by runs"),
        ({"rollout.server_groups": [{"worker_type": "regular"}]}, "rollout.server_groups"),
    ],
)
def test_a_combination_that_no_run_carries_out_is_refused(
    overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError) as error:
        require_runnable(load_recipe("quickstart", overrides))
    assert says in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        *("fully_async", "colocate", "partial_rollout", "sglang_config", "rollout.function_path"),
        *("train.use_dynamic_batch_size", "train.use_dynamic_global_batch_size", "train.backend"),
        *("train.loss_type", "reward.custom_post_process_path", "reward.custom_rm_path"),
        *("data.dynamic_sampling_filter_path", "rollout.sample_filter_path", "distillation.type"),
        *("rollout.oversampling", "train.custom_convert_samples_path", "train.advantage_path"),
    ],
)
def test_what_a_recipe_cannot_say_is_refused_as_unknown(field: str) -> None:
    """A setting of another system must not be taken and then not be heeded."""
    with pytest.raises(RecipeError) as error:
        load_recipe("quickstart", {field: True})
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ({}, {"rollout", "genrm", "teacher"}),
        ({"reward.source": "none"}, {"rollout", "teacher"}),
        ({"distillation": None}, {"rollout", "genrm"}),
    ],
)
def test_either_scorer_alone_or_both_may_be_deferred(
    overrides: dict[str, Any], roles: set[str]
) -> None:
    recipe = load_recipe("quickstart", overrides)
    require_runnable(recipe)
    assert {p.role for p in plan_inference_placement(recipe).placements} == roles


def test_the_reference_recipe_is_placed_in_turns_on_all_sixteen_gpus() -> None:
    recipe = load_recipe("defer-2x8-genrm")
    require_runnable(recipe)
    made = plan_inference_placement(recipe)
    assert (recipe.mode, dict(made.pool_sizes)) == ("defer", {"pool": 16})
    assert {p.bundle_start for p in made.placements} == {0}
    (judge,) = [p for p in made.placements if p.role == "genrm"]
    assert judge.gpus_per_engine == 8
    assert [t.num_gpus for t in made.training if t.role == "trainer"] == [16]
