"""The autoscale section: who may have more replicas, and whether there is room for them."""

from typing import Any

import pytest

from activities.recipes import autoscale_policies
from relax_infer.placement import Violation
from tests.placement.recipes import document, engine, plan, read, refused


def rule(least: int, most: int, **fields: Any) -> dict[str, Any]:
    return {
        "min_replicas": least,
        "max_replicas": most,
        "in_flight_high": 20,
        "in_flight_low": 5,
        **fields,
    }


def apart(gpus: int = 16, **rules: Any) -> dict[str, Any]:
    """Rollout 4, GenRM 2, trainer 4 ranks: ten GPUs."""
    return document(
        "decoupled", gpus, ranks=4, rollout=engine(4), genrm=engine(2, 2), autoscale=rules
    )


def only(violations: tuple[Violation, ...]) -> Violation:
    (found,) = violations
    return found


def test_room_for_every_replica_at_its_most_is_room():
    assert plan(apart(16, rollout=rule(4, 8), genrm=rule(1, 2))).total_required_gpus == 10


@pytest.mark.parametrize("mode", ["defer", "split"])
def test_roles_that_take_turns_cannot_have_more(mode: str):
    recipe = document(mode, 8, rollout=engine(4), genrm=engine(4), autoscale={"genrm": rule(4, 5)})
    found = only(refused(recipe))
    assert found.field == "autoscale"
    assert f"in mode {mode} the roles take turns" in found.rule
    assert found.settings == (("autoscale", None),)


def test_a_cluster_without_room_for_the_most_is_refused_with_what_it_needs():
    found = only(refused(apart(15, rollout=rule(4, 8), genrm=rule(1, 2))))
    assert "needs 16 GPUs, the cluster has 15" in found.rule
    assert found.settings == (("cluster.gpus", 16),)


def test_the_first_replicas_always_stay():
    found = only(refused(apart(rollout=rule(2, 6))))
    assert found.field == "autoscale.rollout.min_replicas"
    assert found.settings == (("autoscale.rollout.min_replicas", 4),)


def test_a_role_without_engines_and_a_model_that_is_not_there_are_named():
    assert only(refused(apart(teacher=rule(1, 2)))).field == "autoscale.teacher"
    found = only(refused(apart(rollout=rule(4, 5, models=["other"]))))
    assert found.field == "autoscale.rollout.models"
    assert "no model other" in found.rule


def test_a_policy_for_each_model_that_is_meant():
    recipe = read(apart(rollout=rule(4, 8, slow_seconds=60), genrm=rule(1, 2, models=["judge"])))

    class Group:
        def __init__(self, role: str, model: str) -> None:
            self.role, self.model = role, model

    groups: list[Any] = [Group("rollout", "policy"), Group("genrm", "judge"), Group("genrm", "b")]
    made = autoscale_policies(recipe, groups)
    assert {role: list(models) for role, models in made.items()} == {
        "rollout": ["policy"],
        "genrm": ["judge"],
    }
    assert made["rollout"]["policy"].slow_seconds == 60
