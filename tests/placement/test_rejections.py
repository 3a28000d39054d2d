"""What cannot be placed: field, rule and cure; before anything starts."""

from typing import Any

import pytest

from relax_infer.config import RecipeError
from relax_infer.placement import PlacementError
from tests.placement.recipes import document, engine, plan, read, refused

ALL = {"genrm": engine(2), "teacher": engine(2)}
FULL = document("split", rollout=engine(8), genrm=engine(8, 4))
PD = [{"worker_type": "prefill"}, {"worker_type": "decode"}]


def extra(model_id: str, **sizes: int) -> dict[str, Any]:
    return {"model": "m", "model_id": model_id, "engine": sizes}


@pytest.mark.parametrize(
    ("recipe", "overrides", "field", "says"),
    [
        (
            document(**ALL),
            {"defer_roles": ["rollout"]},
            "defer_roles",
            "Only GenRM and Teacher can be deferred",
        ),
        (document(**ALL), {"defer_roles": ["critic"]}, "defer_roles", "not 'critic'"),
        (document(), {"defer_roles": ["teacher"]}, "defer_roles", "deferred Teacher without"),
        (document(), {"defer_roles": ["genrm"]}, "defer_roles", "deferred GenRM without"),
        (
            document("split", **ALL),
            {"defer_roles": ["genrm"]},
            "defer_roles",
            "mode defer only, this is split",
        ),
        (FULL, {}, "mode", "Same-phase Rollout and GenRM"),
        (FULL | {"mode": "defer"}, {"defer_roles": []}, "mode", "Same-phase Rollout and GenRM"),
        (
            document("split", rollout=engine(6), genrm=engine(4)),
            {},
            "cluster.gpus",
            "Combined inference needs 10 GPUs (rollout=6, genrm=4), the pool has 8",
        ),
        (
            document("split", rollout=engine(4), teacher=engine(4), genrm=engine(2)),
            {},
            "cluster.gpus",
            "Combined inference needs 10 GPUs",
        ),
        (document(), {"train__offload": False}, "train.offload", "each must offload"),
        (
            document(rollout=engine(4, offload="none")),
            {},
            "rollout.engine.offload",
            "each must offload",
        ),
        (document(), {"rollout__external": True}, "rollout.external", "External Rollout"),
        (
            document("decoupled", 16, ranks=8, genrm=engine(1)),
            {"rollout__external": True},
            "rollout.external",
            "External Rollout cannot be judged",
        ),
        (document(), {"rollout__num_gpus": 8}, "rollout.num_gpus", "Rollout resource is 8"),
        (
            document("decoupled", 16, ranks=8, rollout=engine(8)),
            {"rollout__num_gpus": 4},
            "rollout.num_gpus",
            "Rollout resource is 4 GPUs, its engines need 8",
        ),
        (
            document(genrm=engine(2)),
            {"genrm__num_gpus": 4},
            "genrm.num_gpus",
            "GenRM resource is 4 GPUs, its engines need 2",
        ),
        (
            document(genrm=engine(4, 4)),
            {"genrm__num_gpus": 6},
            "genrm.num_gpus",
            "not a multiple of engines of 4",
        ),
        (
            document(teacher=engine(2)),
            {"teacher__num_gpus": 3, "teacher__extra_models": [extra("second")]},
            "teacher.num_gpus",
            "does not divide evenly: teacher=2, second=1",
        ),
        (
            document(teacher=engine(2)),
            {"teacher__num_gpus": 4},
            "teacher.num_gpus",
            "Teacher resource is 4",
        ),
        (document(), {"rollout__server_groups": []}, "rollout.server_groups", "empty"),
        (
            document(),
            {"rollout__server_groups": PD[:1]},
            "rollout.server_groups",
            "prefill groups without decode groups",
        ),
        (
            document(),
            {"rollout__server_groups": PD[1:]},
            "rollout.server_groups",
            "decode groups without prefill groups",
        ),
        (
            document(),
            {"rollout__server_groups": [*PD, {"worker_type": "regular"}]},
            "rollout.server_groups",
            "mixed",
        ),
        (
            document(),
            {"rollout__server_groups": PD, "rollout__num_gpus": 4},
            "rollout.num_gpus",
            "its engines need 2",
        ),
        (
            document(),
            {"rollout__extra_models": [extra("policy")]},
            "rollout.extra_models.0.model_id",
            "must be unique",
        ),
        (
            document(gpus=16, rollout=engine(12, 12)),
            {},
            "rollout.engine.gpus_per_replica",
            "not whole configured nodes of 8",
        ),
        (
            document(gpus=16, rollout=engine(9, 3)),
            {},
            "rollout.engine.gpus_per_replica",
            "cross the boundary of a node of 8",
        ),
        (
            document(rollout=engine(4, 4, server_args={"tensor-parallel-size": 2})),
            {},
            "rollout.engine.server_args",
            "tp_size 2 x pp_size 1 is not gpus_per_replica 4",
        ),
        (
            document(rollout=engine(4, 4, server_args={"pp_size": 3})),
            {},
            "rollout.engine.server_args",
            "pp_size 3",
        ),
        (
            document(rollout=engine(4, 4, server_args={"pp_size": 0})),
            {},
            "rollout.engine.server_args.pp_size",
            "0, not a positive whole number",
        ),
        (
            document(rollout=engine(4, 4, server_args={"enable_dp_attention": True, "dp_size": 3})),
            {},
            "rollout.engine.server_args.dp_size",
            "DP attention",
        ),
        (
            document(rollout=engine(4, 4, server_args={"nccl-port": 1})),
            {},
            "rollout.engine.server_args.nccl_port",
            "placement decides",
        ),
        (
            document("decoupled", 8, ranks=8),
            {},
            "cluster.gpus",
            "the pools need 12 GPUs (rollout=4, trainer=8), the cluster has 8",
        ),
        (document(ranks=9), {}, "train.ranks", "9 ranks need as many GPUs, the pool has 8"),
        (
            document(ranks=8, reference={"ranks": 4}),
            {},
            "train.ranks",
            "the pool has 4 beside 4 of other pools",
        ),
        (
            document("decoupled", 16, ranks=8),
            {"layout": "rollout -> actor"},
            "layout",
            "in mode decoupled every role has its own",
        ),
    ],
)
def test_what_cannot_be_is_named(
    recipe: dict[str, Any], overrides: dict[str, Any], field: str, says: str
) -> None:
    found = [v for v in refused(recipe, **overrides) if v.field == field]
    assert any(says in v.rule for v in found), refused(recipe, **overrides)
    assert all(v.cure and v.settings for v in found)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"cluster__gpus": 0}, "cluster.gpus: must be a positive whole number, got 0"),
        ({"train__ranks": -1}, "train.ranks: must be a positive whole number"),
        ({"critic": {"ranks": 0}}, "critic.ranks: must be a positive whole number"),
        ({"rollout__num_gpus": 0}, "rollout.num_gpus: must be a positive whole number"),
        (
            {"rollout__server_groups": [{"worker_type": "chunked"}]},
            "rollout.server_groups.0.worker_type: must be one of regular, prefill, decode, got"
            " 'chunked'",
        ),
        ({"mode": "shared"}, "mode: must be one of defer, split, decoupled, got 'shared'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_when_the_recipe_is_read(
    overrides: dict[str, Any], says: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        read(document(), **overrides)
    assert says in str(caught.value)


def test_every_rule_that_is_broken_is_told_at_once() -> None:
    found = refused(
        document(
            "split",
            8,
            ranks=16,
            rollout=engine(6, 3, offload="none", server_args={"port": 1}),
            genrm=engine(12, 12),
        ),
        genrm__num_gpus=5,
        defer_roles=["genrm"],
        rollout__external=False,
        critic={"ranks": 16, "ray_gpu_fraction": 0.7},
    )
    assert {v.field for v in found} == {
        "rollout.engine.server_args.port",
        "rollout.engine.offload",
        "genrm.engine.gpus_per_replica",
        "genrm.engine.replicas",
        "genrm.num_gpus",
        "defer_roles",
        "train.ranks",
        "cluster.gpus",
        "ray_gpu_fraction",
    }
    text = str(PlacementError(found))
    assert all(v.field in text and v.rule in text and v.cure in text for v in found)


def test_a_recipe_that_was_refused_is_not_changed() -> None:
    recipe = read(FULL)
    before = recipe.model_dump()
    refused(FULL)
    assert recipe.model_dump() == before
    assert plan(FULL, mode="defer")
