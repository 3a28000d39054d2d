"""Messages are English for one of a thing, too."""

import re
from typing import Any

import pytest

from relax_infer.contracts.counted import are, counted
from relax_infer.placement.facts import ClusterFacts, Wanted
from relax_infer.placement.picture import legend
from relax_infer.placement.preflight import judge
from relax_infer.placement.room import shortage, shortage_of
from tests.placement.recipes import document, engine, plan, read, refused
from tests.placement.test_rejections import CASES
from tests.placement.test_room import node

THINGS = "nodes|GPUs|replicas|ranks|bundles|engines|parts|models|items|ports|pools"
WRONG = re.compile(rf"(?<![\w.-])1 (\w+-\w+ )?({THINGS})\b")


def test_a_number_has_a_thing_or_things_and_their_verb() -> None:
    assert [f"{counted(n, 'node')} {are(n)}" for n in (0, 1, 2)] == [
        "0 nodes are",
        "1 node is",
        "2 nodes are",
    ]


SMALL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (document("split", 1, rollout=engine(1), genrm=engine(1), ranks=1), {}),
    (document("split", 1, rollout=engine(1), teacher=engine(1), ranks=2), {}),
    (document("decoupled", 1, rollout=engine(1), ranks=1), {}),
    (document(gpus=1, rollout=engine(2), ranks=1), {"rollout__num_gpus": 1}),
    (document(gpus=1, rollout=engine(2, 2), ranks=1), {"rollout__num_gpus": 1}),
    (document(rollout=engine(1)), {"layout": "rollout[1/2] -> actor"}),
    (document(gpus=1, rollout=engine(1), ranks=1), {"layout": "rollout[1/2] -> actor"}),
    (document(rollout=engine(1)), {"layout": "rollout[1/8] -> rollout[1/4] -> actor"}),
    (document(gpus=1, reference={"ranks": 1}, rollout=engine(1), ranks=1), {}),
    (
        document(
            rollout=engine(1, server_args={"enable_dp_attention": True, "dp_size": 2}), ranks=1
        ),
        {},
    ),
    (document(rollout=engine(1, server_args={"dp_size": 2})), {}),
]


@pytest.mark.parametrize(
    ("recipe", "overrides"), [*SMALL, *((recipe, more) for recipe, more, _, _ in CASES)]
)
def test_a_refusal_has_one_of_a_thing(recipe: dict[str, Any], overrides: dict[str, Any]) -> None:
    for violation in refused(recipe, **overrides):
        assert not WRONG.search(f"{violation.rule} {violation.cure}"), violation


def test_pictures_and_lacks_have_one_of_a_thing() -> None:
    made = plan(document(gpus=1, rollout=engine(1), ranks=1))
    lacks = [
        shortage(2, [node("1", gpus=1), node("2", gpus=0)]),
        shortage(99, [node(f"{n}") for n in range(9)]),
        shortage_of([[{"GPU": 1, "CPU": 1, "node:10.0.0.9": 0.001}]], [node("1")]),
    ]
    assert None not in lacks
    texts = [*(text for _, text in legend(made)), *map(str, lacks)]
    assert [text for text in texts if WRONG.search(text)] == []


def test_the_preflight_of_one_gpu_on_one_node_has_one_of_a_thing() -> None:
    recipe = document(gpus=1, rollout=engine(1), ranks=1)
    asked = Wanted(store="memory://store", models=(), ports=1)
    facts = ClusterFacts(nodes=(node("1", gpus=1),), facts=(), accelerators=False, groups=())
    (room,) = [f for f in judge(read(recipe), plan(recipe), asked, facts) if f.name == "cluster"]
    assert room.text == "1 GPU is needed, 1 is free on 1 node"
