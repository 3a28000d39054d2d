import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from relax_infer.config import load_recipe
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    Violation,
    model_placement,
    plan_inference_placement,
)
from tests.placement.recipes import document, engine, read


def violations(**overrides: Any) -> tuple[Violation, ...]:
    recipe = load_recipe("quickstart", {k.replace("__", "."): v for k, v in overrides.items()})
    with pytest.raises(PlacementError) as caught:
        plan_inference_placement(recipe)
    return caught.value.violations


def test_every_role_of_defer_begins_at_the_first_bundle() -> None:
    recipe = load_recipe("quickstart")
    before = recipe.model_dump()
    plan = plan_inference_placement(recipe)
    assert recipe.model_dump() == before
    placed = [(p.role, p.model_id, p.bundle_start, p.bundle_stop) for p in plan.placements]
    assert placed == [
        ("rollout", "policy", 0, 2),
        ("genrm", "judge", 0, 1),
        ("teacher", "teacher", 0, 1),
    ]
    assert [(p.phase, p.deferred) for p in plan.placements] == [
        ("inference", False),
        ("genrm_score", True),
        ("teacher_score", True),
    ]
    assert (plan.mode, plan.total_required_gpus, dict(plan.pool_sizes)) == (
        "defer",
        2,
        {"pool": 2},
    )


def test_only_roles_that_take_part_are_placed() -> None:
    exact = load_recipe("quickstart", {"reward.source": "exact", "distillation": None})
    assert [p.role for p in plan_inference_placement(exact).placements] == ["rollout"]


def test_a_plan_can_be_read_from_its_json() -> None:
    plan = plan_inference_placement(load_recipe("quickstart"))
    document = json.loads(json.dumps(plan.to_dict()))
    for source in (plan, document):
        judge = model_placement(source, "genrm")
        assert judge == plan.placements[1]
        assert model_placement(source, "genrm", "judge") == judge
        assert model_placement(source, "genrm", "nobody") is None
        assert model_placement(source, "critic") is None
    assert model_placement(None, "genrm") is None
    assert document["placements"][0]["replicas"] == 2


@pytest.mark.parametrize("recipe", ["quickstart", "split-4x8", "decoupled-64x8-pd"])
def test_a_plan_is_the_same_again_whatever_order_its_json_is_in(recipe: str) -> None:
    plan = plan_inference_placement(load_recipe(recipe))
    for text in (json.dumps(plan.to_dict()), json.dumps(plan.to_dict(), sort_keys=True)):
        assert InferencePlacementPlan.from_dict(json.loads(text)) == plan


@pytest.mark.parametrize(
    ("part", "key", "value", "says"),
    [
        ("placements", "bundle_start", -5, "bundles -5 to -3 (exclusive) are not in pool pool"),
        ("placements", "num_gpus", 3, "bundles 0 to 3 (exclusive) are not in pool pool of 2"),
        ("placements", "pool", "other", "are not in pool other of 0"),
        ("placements", "gpus_per_engine", 4, "2 GPUs are no whole engines of 4"),
        ("training", "bundle_start", 2, "bundles 2 to 3 (exclusive) are not in pool pool of 2"),
        (None, "total_required_gpus", 7, "7 is not the sum of the pools, 2"),
    ],
)
def test_a_plan_that_cannot_be_is_not_read(part: str | None, key: str, value: Any, says: str):
    document = plan_inference_placement(load_recipe("quickstart")).to_dict()
    (document if part is None else document[part][0])[key] = value
    with pytest.raises(PlacementError, match="the plan is damaged") as refused:
        InferencePlacementPlan.from_dict(document)
    assert says in str(refused.value)


def test_a_plan_whose_engine_crosses_a_node_is_not_read() -> None:
    recipe = document(gpus=16, rollout=engine(4, 4))
    made = plan_inference_placement(read(recipe)).to_dict()
    made["placements"][0]["bundle_start"] = 6
    with pytest.raises(PlacementError, match="its engine of 4 GPUs may not begin at bundle 6"):
        InferencePlacementPlan.from_dict(made)


def test_a_role_larger_than_the_pool_says_how_many_gpus_it_needs() -> None:
    (found,) = violations(teacher__engine={"gpus_per_replica": 4}, train__ray_gpu_fraction=0.1)
    assert found.field == "teacher.engine.replicas"
    assert "need 4 GPUs (1 x 4), the pool has 2" in found.rule
    assert "cluster.gpus to 4" in found.cure


def test_reservations_of_all_turns_add_up_on_each_bundle() -> None:
    full = {"train.ray_gpu_fraction": 0.4, "genrm.engine": {"ray_gpu_fraction": 0.2}}
    assert plan_inference_placement(load_recipe("quickstart", full))  # 0.4 + 3 x 0.2 = 1
    (found,) = violations(genrm__engine={"ray_gpu_fraction": 0.3})
    assert "bundle 0 would reserve 1.1" in found.rule
    assert "trainer=0.4 rollout/policy=0.2 genrm/judge=0.3 teacher/teacher=0.2" in found.rule
    both = violations(
        genrm__engine={"ray_gpu_fraction": 0.9, "replicas": 2}, train__ray_gpu_fraction=0.0
    )
    assert [v.rule.split(" would")[0] for v in both] == ["bundle 0", "bundle 1"]


def test_an_engine_over_several_gpus_reserves_on_its_first_bundle_only() -> None:
    wide = {"replicas": 1, "gpus_per_replica": 2, "ray_gpu_fraction": 0.9}
    others = {"reward.source": "exact", "distillation": None, "train.ray_gpu_fraction": 0.1}
    plan = plan_inference_placement(load_recipe("quickstart", {"rollout.engine": wide, **others}))
    assert list(plan.placements[0].heads) == [0]


@pytest.mark.parametrize(
    "flag",
    [
        *("nnodes", "node-rank", "base_gpu_id", "gpu-id-step"),
        *("dist_init_addr", "nccl-init-addr", "host", "port", "nccl-port"),
    ],
)
def test_flags_that_placement_decides_are_refused(flag: str) -> None:
    (found,) = violations(rollout__engine={"replicas": 2, "server_args": {flag: 1}})
    name = {"nccl-init-addr": "dist_init_addr"}.get(flag, flag.replace("-", "_"))
    assert found.field == f"rollout.engine.server_args.{name}"


def test_a_plan_cannot_be_changed() -> None:
    plan = plan_inference_placement(load_recipe("quickstart"))
    for part, name in ((plan, "mode"), (plan.placements[0], "pool"), (plan.training[0], "role")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, "other")
    assert isinstance(plan.placements, tuple)
    assert isinstance(plan.pool_sizes, tuple)


@pytest.mark.parametrize(
    "args",
    [
        {"tp_size": 2},
        {"pp-size": 2},
        {"tp_size": 1, "pp_size": 2},
        {"enable_dp_attention": True, "dp_size": 2},
    ],
)
def test_parallel_sizes_must_fit_the_engine(args: dict[str, Any]) -> None:
    found = violations(rollout__engine={"server_args": args})
    assert all(v.field.startswith("rollout.engine.server_args") for v in found)


def test_all_violations_are_told_at_once() -> None:
    found = violations(
        rollout__engine={"replicas": 3, "server_args": {"port": 1}},
        teacher__engine={"replicas": 5},
        train__ray_gpu_fraction=1.0,
    )
    assert {v.field for v in found} == {
        "rollout.engine.replicas",
        "rollout.engine.server_args.port",
        "teacher.engine.replicas",
        "ray_gpu_fraction",
    }
    text = str(PlacementError(found))
    assert all(v.rule in text and v.cure in text for v in found)
