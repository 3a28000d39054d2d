"""Which transports of new weights a recipe's mode and engines allow, and what is said otherwise."""

from pathlib import Path
from typing import Any

import pytest

from activities import recipes
from activities.recipes import resolve_recipe
from relax_infer.config import load_recipe
from relax_infer.contracts.run import ResolveRequest, RunInput
from relax_infer.placement import PlacementError, plan_inference_placement

DECOUPLED = {"mode": "decoupled", "cluster.gpus": 5}


def refused(**overrides: Any) -> PlacementError:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(PlacementError) as caught:
        plan_inference_placement(load_recipe("quickstart", given))
    return caught.value


@pytest.mark.parametrize("mode", [{}, {"mode": "split", "cluster.gpus": 4}, DECOUPLED])
@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_disk_and_tensor_go_in_every_mode(mode: dict[str, Any], transport: str):
    plan_inference_placement(
        load_recipe("quickstart", {**mode, "train.weights.transport": transport})
    )


def test_a_process_group_needs_gpus_of_its_own_or_a_cpu():
    group = {"train.weights.transport": "process_group"}
    plan_inference_placement(load_recipe("quickstart", {**DECOUPLED, **group}))
    plan_inference_placement(load_recipe("quickstart", {"cluster.device": "cpu", **group}))
    for device in ("auto", "cuda"):
        (violation,) = refused(
            cluster__device=device, train__weights__transport="process_group"
        ).violations
        assert violation.field == "train.weights.transport"
        assert "never hold their GPUs at the same time" in violation.rule
        assert "tensor" in violation.cure
        cured = dict(violation.settings)
        plan_inference_placement(load_recipe("quickstart", {"cluster.device": device, **cured}))


@pytest.mark.parametrize("flag", ["pp_size", "dp_size", "attn_dp_size"])
@pytest.mark.parametrize("transport", ["tensor", "process_group"])
def test_engines_that_sglang_cannot_update_so_are_named(flag: str, transport: str):
    error = refused(
        cluster__device="cpu",
        rollout__engine__gpus_per_replica=2,
        rollout__engine__replicas=1,
        rollout__engine__server_args={flag: 2},
        train__weights__transport=transport,
    )
    assert any(flag in v.rule and v.field == "train.weights.transport" for v in error.violations)


def test_shared_memory_does_not_reach_other_nodes():
    error = refused(
        **{"cluster.gpus": 4, "cluster.gpus_per_node": 2, "cluster.device": "cpu"},
        rollout__engine__gpus_per_replica=4,
        rollout__engine__replicas=1,
        train__weights__transport="tensor",
    )
    assert any("shared memory" in v.rule for v in error.violations)


@pytest.mark.parametrize(
    ("overrides", "in_place", "transport", "patience"),
    [
        ({}, False, "disk", 360.0),
        (DECOUPLED, True, "disk", 390.0),
        ({**DECOUPLED, "train.weights.in_place": False}, False, "disk", 360.0),
        ({"train.weights.transport": "tensor"}, False, "tensor", 660.0),
        ({**DECOUPLED, "train.weights.transport": "process_group"}, True, "process_group", 690.0),
    ],
)
async def test_a_run_s_plan_says_how_weights_come(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any],
    in_place: bool,
    transport: str,
    patience: float,
):
    monkeypatch.setenv("RELAX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "weights_digest", lambda folder: "digest")
    monkeypatch.setattr(recipes, "lacking_here", lambda recipe: [])
    models = {f"{role}.model": str(tmp_path / role) for role in ("rollout", "genrm", "teacher")}
    own = {"cluster.device": "cpu", **models, **overrides}
    start = RunInput(recipe="quickstart", overrides=own)
    plan = await resolve_recipe(ResolveRequest(run="run-1", start=start))
    assert plan.updates_in_place is in_place
    told = {group.role: group.weights.transport for group in plan.groups}
    assert told == {"rollout": transport, "genrm": "disk", "teacher": "disk"}
    assert plan.operation_timeout == patience, "both may pass before the disk is read"
