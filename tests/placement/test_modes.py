"""Where the modes put each role, and how many GPUs that takes."""

import json
from typing import Any

import pytest

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.placement import (
    InferencePlacementPlan,
    model_placement,
    plan_inference_placement,
)
from tests.placement.recipes import document, engine, plan, slices

SPLIT = document("split", rollout=engine(4), genrm=engine(2), teacher=engine(2))
DEFER = document("defer", rollout=engine(8), genrm=engine(8, 4), teacher=engine(8, 8))


def test_split_puts_the_roles_side_by_side_in_one_order() -> None:
    made = plan(SPLIT)
    assert slices(made) == [
        ("rollout", "policy", 0, 4),
        ("genrm", "judge", 4, 6),
        ("teacher", "teacher", 6, 8),
    ]
    assert made.mode == "split"
    assert {(p.owner, p.pool, p.phase, p.deferred) for p in made.placements} == {
        ("controller", "pool", "inference", False)
    }
    assert [(p.name, p.roles) for p in made.phases] == [
        ("inference", ("rollout", "genrm", "teacher")),
        ("train", ("trainer",)),
    ]


def test_defer_begins_at_the_first_bundle_for_every_turn() -> None:
    made = plan(DEFER)
    assert [(role, start, stop) for role, _, start, stop in slices(made)] == [
        ("rollout", 0, 8),
        ("genrm", 0, 8),
        ("teacher", 0, 8),
    ]
    assert [p.phase for p in made.placements] == ["inference", "genrm_score", "teacher_score"]
    assert [p.name for p in made.phases] == ["inference", "genrm_score", "teacher_score", "train"]
    assert [t.activate for t in made.transitions] == [
        ("rollout",),
        ("genrm",),
        ("teacher",),
        ("trainer",),
    ]
    assert made.transitions[0].deactivate == ("trainer",)


def test_a_role_that_is_not_deferred_is_beside_the_rollout() -> None:
    made = plan(
        document(rollout=engine(4), genrm=engine(4), teacher=engine(8, 8)),
        defer_roles=["teacher"],
    )
    assert slices(made) == [
        ("rollout", "policy", 0, 4),
        ("genrm", "judge", 4, 8),
        ("teacher", "teacher", 0, 8),
    ]
    assert [(p.role, p.deferred) for p in made.placements if p.deferred] == [("teacher", True)]
    assert made.mode == "defer"


def test_decoupled_gives_each_role_a_pool_and_all_run_at_once() -> None:
    made = plan(
        document(
            "decoupled",
            26,
            ranks=8,
            rollout=engine(4),
            genrm=engine(2),
            teacher=engine(2),
            critic={"ranks": 4},
            reference={"ranks": 2},
            actor_fwd={"ranks": 4},
        )
    )
    assert made.total_required_gpus == 8 + 4 + 2 + 2 + 4 + 2 + 4 == 26
    assert dict(made.pool_sizes) == {
        "rollout": 4,
        "genrm": 2,
        "teacher": 2,
        "trainer": 8,
        "critic": 4,
        "reference": 2,
        "actor_fwd": 4,
    }
    assert [(p.owner, p.pool, p.bundle_start) for p in made.placements] == [
        (role, role, 0) for role in ("rollout", "genrm", "teacher")
    ]
    (phase,) = made.phases
    assert phase.name == "inference+train"
    (transition,) = made.transitions
    assert transition.keep == phase.roles
    assert transition.activate == transition.deactivate == ()


@pytest.mark.parametrize(
    ("critic", "reference", "gpus", "pools"),
    [
        (8, 4, 12, {"pool": 8, "reference": 4}),
        (2, 4, 14, {"pool": 8, "critic": 2, "reference": 4}),
    ],
)
def test_only_a_critic_of_the_trainers_size_shares_its_pool(
    critic: int, reference: int, gpus: int, pools: dict[str, int]
) -> None:
    made = plan(
        document("split", gpus, ranks=8),
        critic={"ranks": critic},
        reference={"ranks": reference},
    )
    assert dict(made.pool_sizes) == pools
    assert made.total_required_gpus == gpus
    assert made.training_roles == ("trainer", "critic", "reference")
    always = [phase for phase in made.phases if "reference" in phase.roles]
    assert len(always) == len(made.phases)
    assert ("critic_train" in [p.name for p in made.phases]) == (critic == 8)


@pytest.mark.parametrize(
    ("gpus", "start"),
    [(3, 4), (4, 4), (2, 2)],
)
def test_an_engine_begins_at_a_multiple_of_its_size(gpus: int, start: int) -> None:
    made = plan(document("split", rollout=engine(gpus), genrm=engine(2, 2)))
    assert slices(made)[1] == ("genrm", "judge", start, start + 2)


def test_an_odd_size_stays_within_a_node() -> None:
    made = plan(document("split", 16, rollout=engine(6), genrm=engine(6, 3)))
    assert slices(made)[1][2:] == (8, 14)


def test_several_models_of_a_role_follow_each_other() -> None:
    recipe = document("split", rollout=engine(4), genrm=engine(2))
    recipe["genrm"]["extra_models"] = [
        {"model": "m", "model_id": "safety", "engine": engine(2, 2)},
    ]
    made = plan(recipe)
    assert slices(made) == [
        ("rollout", "policy", 0, 4),
        ("genrm", "judge", 4, 6),
        ("genrm", "safety", 6, 8),
    ]
    assert model_placement(made, "genrm") is None
    found = model_placement(made, "genrm", "safety")
    assert found is not None
    assert found.replicas == 1
    in_turn = plan(recipe | {"mode": "defer"})
    assert slices(in_turn)[1:] == [("genrm", "judge", 0, 2), ("genrm", "safety", 2, 4)]


def test_the_default_model_is_the_roles_only_one() -> None:
    made = plan(SPLIT)
    assert model_placement(made, "genrm", "__default__") == made.placements[1]
    assert model_placement(made.to_dict(), "genrm", "__default__") == made.placements[1]
    assert model_placement(made, "genrm", "unknown") is None


def test_prefill_and_decode_groups_are_placed_in_their_order() -> None:
    recipe = document("decoupled", 40, ranks=8, rollout={"server_args": {"page_size": 64}})
    recipe["rollout"]["server_groups"] = [
        {"worker_type": "prefill", "replicas": 2, "gpus_per_replica": 4},
        {
            "worker_type": "decode",
            "gpus_per_replica": 16,
            "server_args": {"dp_size": 16, "enable_dp_attention": True},
        },
    ]
    made = plan(recipe)
    assert [
        (p.group_id, p.worker_type, p.bundle_start, p.bundle_stop) for p in made.placements
    ] == [
        ("prefill-0", "prefill", 0, 8),
        ("decode-1", "decode", 8, 24),
    ]
    decode = model_placement(made, "rollout", "policy", "decode-1")
    assert decode is not None
    assert (decode.nodes_per_engine, decode.num_worker_slots, decode.tp) == (2, 2, 16)
    assert list(decode.heads) == [8, 16]
    assert dict(made.pool_sizes)["rollout"] == 24


def test_an_engine_over_two_nodes_begins_at_a_node() -> None:
    made = plan(
        document("split", 32, rollout=engine(4), genrm=engine(16, 16, server_args={"pp_size": 2}))
    )
    judge = made.placements[1]
    assert (judge.bundle_start, judge.bundle_stop) == (8, 24)
    assert (judge.tp, judge.pp, judge.nodes_per_engine, judge.gpus_per_worker) == (8, 2, 2, 8)


def test_a_rollout_may_need_less_than_its_own_pool_has() -> None:
    made = plan(document("decoupled", 16, ranks=8), rollout__num_gpus=8)
    assert dict(made.pool_sizes) == {"rollout": 8, "trainer": 8}
    assert made.placements[0].num_gpus == 4


def test_an_external_rollout_leaves_the_teacher_to_us() -> None:
    made = plan(document("decoupled", 10, ranks=8, teacher=engine(2)), rollout__external=True)
    assert slices(made) == [("teacher", "teacher", 0, 2)]


def test_training_alone_places_no_engine_and_needs_no_offload() -> None:
    made = plan(
        document(rollout=engine(8, offload="none"), genrm=engine(64)),
        debug="train_only",
        train__offload=False,
    )
    assert made.placements == ()
    assert made.training_roles == ("trainer",)
    assert [p.name for p in made.phases] == ["train"]


def test_rollout_alone_shares_nothing() -> None:
    made = plan(document(rollout=engine(8)), debug="rollout_only")
    assert made.training_roles == ()
    assert made.mode == "decoupled"
    assert dict(made.pool_sizes) == {"rollout": 8}


def test_a_teacher_that_does_not_distil_is_not_placed() -> None:
    assert [role for role, *_ in slices(plan(DEFER, distillation=None))] == ["rollout", "genrm"]


def test_parallel_sizes_do_not_multiply_gpus() -> None:
    made = plan(
        document(genrm=engine(8, 8, server_args={"dp_size": 8, "enable_dp_attention": True}))
    )
    assert (made.placements[1].num_gpus, made.placements[1].tp) == (8, 8)


SHIPPED = {
    "quickstart": ("defer", 2, ["0:2", "0:1", "0:1"]),
    "defer-1x8-opd": ("defer", 8, ["0:8", "0:8", "0:8"]),
    "defer-2x8-genrm": ("defer", 16, ["0:16", "0:16"]),
    "split-4x8": ("split", 32, ["0:16", "16:20", "20:24", "24:32"]),
    "decoupled-64x8-pd": ("decoupled", 512, ["0:64", "64:192", "0:32", "0:32"]),
}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_placed(name: str) -> None:
    made = plan_inference_placement(load_recipe(name))
    spans = [f"{p.bundle_start}:{p.bundle_stop}" for p in made.placements]
    assert (made.mode, made.total_required_gpus, spans) == SHIPPED[name]
    text = json.dumps(made.to_dict())
    assert InferencePlacementPlan.from_dict(json.loads(text)) == made


def test_the_two_node_recipe_has_the_engines_that_its_comment_says() -> None:
    recipe = load_recipe("defer-2x8-genrm")
    rollout, judge = plan_inference_placement(recipe).placements
    assert (rollout.replicas, rollout.gpus_per_engine, rollout.tp) == (8, 2, 2)
    assert (judge.replicas, judge.gpus_per_engine, judge.tp, judge.deferred) == (2, 8, 8, True)
    assert recipe.train.ranks == 16
    assert recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt == 128


def test_the_quickstarts_plan_says_what_it_said_before() -> None:
    alike: dict[str, Any] = {
        "num_gpus_per_node": 2,
        "pool": "pool",
        "owner": "controller",
        "gpus_per_engine": 1,
        "bundle_start": 0,
        "tp": 1,
        "pp": 1,
        "ray_gpu_fraction": 0.2,
        "group_id": "default",
        "worker_type": "regular",
        "nodes_per_engine": 1,
    }
    each = [
        ("rollout", "policy", 2, "inference", False),
        ("genrm", "judge", 1, "genrm_score", True),
        ("teacher", "teacher", 1, "teacher_score", True),
    ]
    made = plan_inference_placement(load_recipe("quickstart")).to_dict()
    assert made["placements"] == [
        {
            **alike,
            **{"role": role, "model_id": model, "num_gpus": gpus, "bundle_stop": gpus},
            **{"phase": phase, "deferred": deferred, "replicas": gpus, "num_worker_slots": gpus},
        }
        for role, model, gpus, phase, deferred in each
    ]
    assert {
        k: made[k] for k in ("mode", "total_required_gpus", "pool_sizes", "training_roles")
    } == {
        "mode": "defer",
        "total_required_gpus": 2,
        "pool_sizes": {"pool": 2},
        "training_roles": ["trainer"],
    }
