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


CASES: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
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
    (
        document("split", 16, rollout=engine(1), genrm=engine(8, 8), teacher=engine(7)),
        {},
        "cluster.gpus",
        "Combined inference needs 23 GPUs (rollout=1, genrm=8, teacher=7, 7 unused so that"
        " engines begin where their nodes allow), the pool has 16",
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
        document(gpus=16, rollout=engine(15, 3)),
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
        document(rollout=engine(4, 4, server_args={"model": "/other"})),
        {},
        "rollout.engine.server_args.model",
        "the run decides this flag itself",
    ),
    (
        document(rollout=engine(4, 4, server_args={"fence-token": "9:x"})),
        {},
        "rollout.engine.server_args.fence-token",
        "the run decides this flag itself",
    ),
    (
        document(rollout=engine(4, 4, server_args={"weight-vers": "7"})),
        {},
        "rollout.engine.server_args.weight-vers",
        "SGLang may take it for weight_version",
    ),
    (
        document(rollout=engine(4, 4, server_args={"grpc_port": 9})),
        {},
        "rollout.engine.server_args.grpc_port",
        "the engine's fence does not guard",
    ),
    (
        document(rollout=engine(4, 4, server_args={"enable_memory_saver": False})),
        {},
        "rollout.engine.server_args.enable_memory_saver",
        "would free nothing",
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
        document(rollout=engine(4, 4, server_args={"dp_size": 2})),
        {},
        "rollout.engine.server_args.dp_size",
        "dp_size 2 without enable_dp_attention would start 2 engines of 4 GPUs",
    ),
    (
        document(
            rollout=engine(4, 4, server_args={"dp": 2, "enable_dp_attention": False}),
        ),
        {},
        "rollout.engine.server_args.dp",
        "without enable_dp_attention",
    ),
    (
        document(rollout=engine(4, 4, server_args={"dp_size": 2, "enable_dp_attention": "false"})),
        {},
        "rollout.engine.server_args.enable_dp_attention",
        "'false', not true or false",
    ),
    (
        document(rollout=engine(4, 4, server_args={"attn-dp-size": 3})),
        {},
        "rollout.engine.server_args.attn_dp_size",
        "DP attention splits 4",
    ),
    (
        document(rollout=engine(4, 4, server_args={"attn-dp-size": 2, "dp-size": 2})),
        {},
        "rollout.engine.server_args.dp-size",
        "beside attn_dp_size",
    ),
    (
        document(rollout=engine(4, 4, server_args={"page-size": 1, "page_size": 16})),
        {},
        "rollout.engine.server_args.page-size",
        "page-size and page_size are one flag",
    ),
    (
        document(rollout=engine(4, 4, server_args={"tp_size": 4, "tensor-parallel-size": 2})),
        {},
        "rollout.engine.server_args.tp_size",
        "tp_size and tensor-parallel-size are one flag",
    ),
    (
        document(rollout=engine(4, 4, server_args={"pipeline-parallel": 2})),
        {},
        "rollout.engine.server_args.pipeline-parallel",
        "SGLang may take it for pipeline_parallel_size",
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
    (
        document("split"),
        {"max_staleness": 1},
        "max_staleness",
        "generation can be ahead of training only where each has GPUs of its own",
    ),
    (document(ranks=9), {}, "train.ranks", "each rank needs a GPU, 9 in all; the pool has 8"),
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
]
"""Recipe, overrides, the field that is named, and what is said of it."""


@pytest.mark.parametrize(("recipe", "overrides", "field", "says"), CASES)
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


@pytest.mark.parametrize(
    "name",
    [
        *("", " judge", "judge\n", "a/b", "/", "__default__", "a\nb"),
        *("judge \x1b[31mX", "a\x01b", "a\u2028b", "\ufffe", "\ud800"),
    ],
)
def test_a_model_id_that_no_registry_takes_is_refused(name: str) -> None:
    """Contract 1.2 and 2."""
    for key in ("genrm__model_id", "teacher__model_id"):
        with pytest.raises(
            RecipeError, match=f"{key.replace('__', '.')}: must be a name without /"
        ):
            read(document(**ALL), **{key: name})
    with pytest.raises(RecipeError, match=r"rollout\.extra_models\.0\.model_id: must be a name"):
        read(document(), rollout__extra_models=[extra(name)])
    assert read(document(**ALL), genrm__model_id="Qwen3.5 27B é").genrm


def test_a_recipes_name_is_of_characters_that_a_terminal_only_shows() -> None:
    with pytest.raises(RecipeError, match="name: must be of printable characters") as caught:
        read(document(name="placed \x1b[31m"))
    assert caught.value.message.isprintable()
    assert read(document(name="My run: é")).name == "My run: é"


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


def test_a_pipeline_is_the_same_to_planner_and_launcher_under_every_name() -> None:
    for name in ("pp", "pp_size", "pp-size", "pipeline_parallel_size", "pipeline-parallel-size"):
        (placed,) = plan(document(rollout=engine(4, 4, server_args={name: 2}))).placements
        assert (placed.tp, placed.pp) == (2, 2), name


def test_dp_attention_under_its_new_name_is_within_the_engine() -> None:
    (placed,) = plan(document(rollout=engine(4, 4, server_args={"attn_dp_size": 2}))).placements
    assert (placed.num_gpus, placed.tp) == (4, 4)


def test_a_recipe_that_was_refused_is_not_changed() -> None:
    recipe = read(FULL)
    before = recipe.model_dump()
    refused(FULL)
    assert recipe.model_dump() == before
    assert plan(FULL, mode="defer")


@pytest.mark.parametrize("name", ["model-path=/other", "--port", "", "tp size"])
def test_what_is_no_name_of_a_flag_is_no_recipe(name: str) -> None:
    """It would be another flag, or two, on the engine's command line."""
    with pytest.raises(RecipeError, match=r"rollout\.engine\.server_args: .* is no flag"):
        read(document(rollout=engine(4, server_args={name: 1})))


def test_shares_add_up_as_ray_rounds_them() -> None:
    """0.6667 + 0.1667 + 0.1667: the last of them would wait for ever."""
    shares = {"ray_gpu_fraction": 0.16666}
    (found,) = refused(
        document(rollout=engine(4, **shares), genrm=engine(4, **shares)) | {"defer_roles": None},
        train__ray_gpu_fraction=0.66666,
    )
    assert "would reserve 1.0001 of its one GPU" in found.rule
    with pytest.raises(RecipeError, match=r"steps of 0\.0001"):
        read(document(), train__ray_gpu_fraction=0.00001)


@pytest.mark.parametrize(
    ("mode", "cure"),
    [
        ("defer", "Leave debug out, or leave defer_roles out."),
        ("split", "Set mode to defer and leave debug out, or leave defer_roles out."),
    ],
)
def test_deferred_roles_beside_a_debug_that_shares_nothing_name_the_debug(
    mode: str, cure: str
) -> None:
    """A recipe of mode defer was told that it is decoupled, and to set mode to defer."""
    alone = {"debug": "rollout_only", "defer_roles": ["genrm"]}
    (found,) = refused(document(mode, genrm=engine(2)), **alone)
    assert found.rule.endswith(
        f"this is {mode} with debug rollout_only, which gives each role GPUs of its own."
    )
    assert found.cure == cure
    assert plan(document(genrm=engine(2)), defer_roles=["genrm"])
    assert plan(document(mode, genrm=engine(2)), debug="rollout_only")
