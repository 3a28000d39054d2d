"""All cures of a refusal, at once: they agree, and behind them nothing is wrong."""

from typing import Any

import pytest

from relax_infer.placement import Violation
from relax_infer.placement.cures import LATER, agreed, with_uncovered
from tests.placement.recipes import document, engine, plan, read, refused

RULE = {"min_replicas": 1, "max_replicas": 4, "in_flight_high": 9, "in_flight_low": 1}


def violation(**settings: Any) -> Violation:
    return Violation("field", "rule", "cure", tuple(settings.items()))


@pytest.mark.parametrize(
    ("first", "second", "value"),
    [
        ({"cluster.gpus": 12}, {"cluster.gpus": 9}, {"cluster.gpus": 12}),
        ({"a.min_replicas": 2}, {"a.min_replicas": 3}, {"a.min_replicas": 3}),
        ({"mode": "defer"}, {"mode": "split"}, {"mode": "split"}),
        ({"layout": None}, {"layout": None}, {"layout": None}),
        ({"autoscale.rollout.models": None}, {"autoscale": None}, {"autoscale": None}),
    ],
)
def test_of_two_cures_of_a_key_there_is_one_value(
    first: dict[str, Any], second: dict[str, Any], value: dict[str, Any]
) -> None:
    assert agreed([violation(**first), violation(**second)]) == value


def test_what_a_cure_uncovers_is_told_behind_it() -> None:
    """Without the script, mode split has no room."""
    found = refused(document("split", rollout=engine(8), genrm=engine(4)), layout="rollout =>")
    assert [v.field for v in found] == ["layout", "cluster.gpus"]
    assert found[1].rule.startswith(f"{LATER}Combined inference needs 12 GPUs")
    cures = dict(setting for v in found for setting in v.settings)
    assert cures == {"layout": None, "cluster.gpus": 12}


def test_a_larger_size_that_another_cure_needs_is_in_both() -> None:
    found = refused(document("split", ranks=20, rollout=engine(8), genrm=engine(4)))
    assert {v.field: v.settings for v in found} == {
        "train.ranks": (("cluster.gpus", 20),),
        "cluster.gpus": (("cluster.gpus", 20),),
    }
    (combined,) = [v for v in found if v.field == "cluster.gpus"]
    assert combined.cure.startswith("Raise it to 12, lower replicas")
    assert combined.cure.endswith("Together with the others: cluster.gpus 20.")


def test_cures_of_mode_and_autoscale_do_not_contradict_each_other() -> None:
    roles = document("split", rollout=engine(4), genrm=engine(4))
    found = refused(roles, layout="rollout -> genrm -> actor", autoscale={"genrm": RULE})
    assert [v.settings for v in found] == [(("mode", "defer"),), (("autoscale", None),)]
    assert plan(roles, layout="rollout -> genrm -> actor", mode="defer").mode == "defer"


def test_a_cure_that_another_overrules_says_the_others_value_alone() -> None:
    """It said to set mode to split and, behind it, mode defer."""
    said = Violation(
        "mode", "the layout is of mode split.", "Set mode to split.", (("mode", "split"),)
    )
    found = with_uncovered(
        read(document()),
        [said, violation(mode="defer", layout=None), violation(**{"layout.x": 1})],
        lambda _: [],
    )
    assert [v.cure for v in found] == [
        "Set mode to defer, as the others need.",
        "cure",
        "Leave layout out, as the others need.",
    ]
    assert found[0].settings == (("mode", "defer"),)


def test_one_transport_cures_everything_that_is_said_of_it() -> None:
    parts = engine(4, 4, server_args={"pp_size": 2})
    found = refused(document(rollout=parts), train__weights__transport="process_group")
    assert len(found) == 2
    assert {v.settings for v in found} == {(("train.weights.transport", "disk"),)}


def test_the_most_replicas_that_a_model_begins_with_is_the_least_for_the_role() -> None:
    roles = document("decoupled", 32, ranks=4, rollout=engine(4), genrm=engine(2))
    roles["genrm"]["extra_models"] = [{"model": "m", "model_id": "b", "engine": engine(6)}]
    (found,) = refused(roles, autoscale={"genrm": RULE})
    assert "b begins with 6 replicas" in found.rule
    assert dict(found.settings) == {
        "autoscale.genrm.min_replicas": 6,
        "autoscale.genrm.max_replicas": 6,
    }
