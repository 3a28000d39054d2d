"""The layout script: grammar, slots, transitions, and what it refuses with its character."""

from typing import Any

import pytest

from relax_infer.config import RecipeError
from relax_infer.placement import LayoutError, parse_layout
from tests.placement.recipes import document, engine, plan, read, refused

EXAMPLE = "rollout[1/2] + genrm[1/2] -> teacher -> actor[/]"
ROLES = document(rollout=engine(4, 2), genrm=engine(4, 4), teacher=engine(8, 8))


def test_a_script_is_phases_of_holders_with_shares() -> None:
    phases = parse_layout(" rollout[ 1 / 2 ]+genrm->teacher ->actor[/] ")
    assert [[str(holder) for holder in phase] for phase in phases] == [
        ["rollout[1/2]", "genrm"],
        ["teacher"],
        ["actor[/]"],
    ]
    assert [holder.position for phase in phases for holder in phase] == [2, 19, 26, 36]


def test_a_layout_becomes_slots_and_transitions() -> None:
    made = plan(ROLES, layout=EXAMPLE)
    assert made.mode == "defer"
    assert [
        (phase.name, [(s.role, s.bundle_start, s.bundle_stop) for s in phase.slots])
        for phase in made.phases
    ] == [
        ("inference", [("rollout", 0, 4), ("genrm", 4, 8)]),
        ("teacher_score", [("teacher", 0, 8)]),
        ("train", [("trainer", 0, 8)]),
    ]
    assert [(t.source, t.target, t.deactivate, t.activate, t.keep) for t in made.transitions] == [
        (2, 0, ("trainer",), ("rollout", "genrm"), ()),
        (0, 1, ("rollout", "genrm"), ("teacher",), ()),
        (1, 2, ("teacher",), ("trainer",), ()),
    ]
    assert [(p.role, p.phase, p.deferred) for p in made.placements] == [
        ("rollout", "inference", False),
        ("genrm", "inference", False),
        ("teacher", "teacher_score", True),
    ]


def test_a_role_that_stays_keeps_its_slots() -> None:
    made = plan(
        document(rollout=engine(4), genrm=engine(4), teacher=engine(4)),
        layout="rollout + genrm -> genrm + teacher -> actor[/]",
    )
    assert [t.keep for t in made.transitions] == [(), ("genrm",), ()]
    assert [(p.role, p.bundle_start) for p in made.placements] == [
        ("rollout", 0),
        ("genrm", 4),
        ("teacher", 0),
    ]


def test_a_split_that_the_fixed_order_alone_cannot_place_is_told_of_the_layout() -> None:
    roles = document("split", rollout=engine(2), genrm=engine(4, 4), teacher=engine(2, 2))
    (found,) = refused(roles)
    assert "2 unused so that engines begin" in found.rule
    assert "Key layout may place" in found.cure
    assert plan(roles, layout="rollout + genrm + teacher -> actor").mode == "split"
    (large,) = refused(document("split", rollout=engine(5), genrm=engine(4, 4)))
    assert "layout" not in large.cure


def test_slots_are_free_in_every_phase_of_a_role() -> None:
    """Behind the judge, which keeps its slots while the Teacher scores."""
    made = plan(
        document("split", rollout=engine(2), genrm=engine(4), teacher=engine(4)),
        mode="defer",
        layout="rollout -> rollout + genrm[1/2] -> genrm[1/2] + teacher -> actor[/]",
        genrm__engine__gpus_per_replica=2,
        genrm__engine__replicas=2,
        teacher__engine__replicas=2,
    )
    assert [(p.role, p.bundle_start) for p in made.placements] == [
        ("rollout", 0),
        ("genrm", 2),
        ("teacher", 0),
    ]
    assert made.phases[2].slots[0].bundle_start == 2
    assert [t.activate for t in made.transitions] == [
        ("rollout",),
        ("genrm",),
        ("teacher",),
        ("trainer",),
    ]


def test_training_may_be_beside_inference() -> None:
    made = plan(
        document(rollout=engine(4), ranks=4), layout="rollout[1/2] + actor[1/2]", mode="split"
    )
    (trainer,) = made.training
    assert (trainer.bundle_start, trainer.bundle_stop) == (4, 8)
    assert made.phases[0].name == "inference+train"
    assert made.transitions[0].keep == ("rollout", "trainer")


def test_a_critic_has_a_turn_of_its_own() -> None:
    made = plan(
        document(rollout=engine(8)), critic={"ranks": 8}, layout="rollout[/] -> critic[/] -> actor"
    )
    assert [p.name for p in made.phases] == ["inference", "critic_train", "train"]


def test_a_layout_of_several_models_gives_the_role_one_block() -> None:
    recipe = document("split", 16, rollout=engine(8, 4), genrm=engine(2))
    recipe["genrm"]["extra_models"] = [{"model": "m", "model_id": "b", "engine": engine(4, 4)}]
    made = plan(recipe, layout="rollout[1/2] + genrm[1/2] -> actor[/]")
    assert [(p.model_id, p.bundle_start, p.bundle_stop) for p in made.placements] == [
        ("policy", 0, 8),
        ("judge", 8, 10),
        ("b", 12, 16),
    ]


@pytest.mark.parametrize(
    ("script", "position", "says"),
    [
        ("", 1, "a role is expected, not the end"),
        ("rollout ->", 11, "a role is expected, not the end"),
        ("rollout genrm", 9, "'+', '->' or the end is expected, not 'genrm'"),
        ("rollout + -> actor", 11, "a role is expected, not '->'"),
        ("[1/2] -> actor", 1, "a role is expected, not '[1/2]'"),
        ("rollout[1/2", 8, "'[' is not part of a layout"),
        ("rollout[half]", 8, "[half] is not a share"),
        ("rollout[3/2]", 8, "[3/2] is not more than nothing and at most all"),
        ("rollout[0/2]", 8, "[0/2] is not more than nothing"),
        ("rollout[1/0]", 8, "[1/0] is not more than nothing"),
        ("rollout -> learner", 12, "no role 'learner'"),
        ("rollout => actor", 9, "'=' is not part of a layout"),
        ("rollout[1/2][1/2]", 13, "is expected, not '[1/2]'"),
        (f"rollout[1/{'9' * 900}]", 8, "9... is not a share"),
        ("rollout[1/12345678]", 8, "[1/12345678] is not a share"),
        ("rollout[1/\N{ARABIC-INDIC DIGIT THREE}]", 8, "] is not a share"),
        ("rollout[\x1b[31m]", 8, r"[\x1b[31m] is not a share"),
        ("l" * 900, 1, "no role 'lll"),
    ],
)
def test_a_script_off_the_grammar_names_the_character(
    script: str, position: int, says: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(script)
    assert [fault.position for fault in caught.value.faults] == [position]
    assert says in str(caught.value)
    (found,) = (v for v in refused(document(), layout=script) if v.field == "layout")
    assert found.rule.startswith(f"character {position}: ")
    assert len(found.rule) < 150
    assert found.rule.isprintable()


def test_a_script_off_the_grammar_is_told_everything_at_once() -> None:
    script = "rollot[1/2] + genrm[3/2] - > teacher -> actor[x] critic ->"
    with pytest.raises(LayoutError) as caught:
        parse_layout(script)
    told = {fault.position: fault.rule for fault in caught.value.faults}
    assert list(told) == [1, 20, 26, 46, 50, 59]
    assert told[26] == "'-' is not part of a layout."
    assert told[50] == "'+', '->' or the end is expected, not 'critic'."
    found = [v for v in refused(document(), layout=script) if v.field == "layout"]
    assert len(found) == len(told)


@pytest.mark.parametrize(
    ("script", "position", "says"),
    [
        (
            "rollout[1/4] + genrm[1/2] -> teacher -> actor[/]",
            1,
            "rollout[1/4] is 2 of 8 GPUs, the recipe configures 4 (2 replicas x 2)",
        ),
        ("rollout[1/2] + genrm[1/3] -> teacher -> actor[/]", 16, "2.66667, not whole ones"),
        ("rollout + genrm -> teacher -> actor[1/2]", 31, "actor[1/2] is 4 of 8 GPUs"),
        (
            "rollout[1/2] + genrm + teacher -> actor",
            24,
            "phase 1 needs 16 GPUs, the pool has 8",
        ),
        ("rollout + genrm -> actor", 25, "teacher has no phase"),
        ("rollout + rollout + genrm -> teacher -> actor", 11, "rollout is twice in one phase"),
        (
            "rollout + genrm -> teacher -> critic -> actor",
            31,
            "critic has no part in the shared pool",
        ),
        (
            "rollout[1/2] + genrm -> rollout[/] -> teacher -> actor",
            25,
            "an earlier phase has 4: a role keeps its slots",
        ),
    ],
)
def test_what_cannot_be_laid_out_names_the_character(script: str, position: int, says: str) -> None:
    found = [v for v in refused(ROLES, layout=script) if v.field == "layout"]
    (at,) = [v for v in found if v.rule.startswith(f"character {position}: ")]
    assert says in at.rule


@pytest.mark.parametrize("first", ["rollout + genrm", "genrm + rollout"])
def test_slots_are_found_in_whatever_order_a_phase_is_written(first: str) -> None:
    """With the policy from bundle 0 there would be four GPUs beside the judge, not side by side."""
    made = plan(
        document(rollout=engine(3), genrm=engine(2), teacher=engine(4)),
        layout=f"{first} -> genrm + teacher -> actor",
    )
    held = {p.role: set(range(p.bundle_start, p.bundle_stop)) for p in made.placements}
    assert not held["genrm"] & (held["rollout"] | held["teacher"])


def test_slots_that_cannot_stay_are_refused() -> None:
    """Two engines of five GPUs are around the end of the first node, and leave no four of it."""
    (found,) = refused(
        document(gpus=16, rollout=engine(10, 5), genrm=engine(4, 4), teacher=engine(3, 3)),
        layout="rollout + genrm -> genrm + teacher -> actor",
    )
    assert "character 11: genrm finds no slots that stay the same" in found.rule
    assert "none may cross the end of a node of 8" in found.rule


@pytest.mark.parametrize(
    ("script", "position", "says"),
    [
        ("genrm -> rollout -> teacher -> actor", 1, "genrm is before rollout"),
        ("teacher + genrm -> rollout -> actor", 1, "teacher is before rollout"),
        ("actor -> rollout + genrm -> teacher", 1, "actor is before rollout"),
        (
            "rollout + genrm -> actor -> teacher",
            20,
            "actor ends its turn before teacher has scored",
        ),
        ("rollout + actor -> genrm -> teacher", 11, "actor ends its turn before teacher has"),
        (
            "rollout + genrm -> teacher -> rollout -> actor",
            31,
            "rollout comes back after its turn has ended",
        ),
        (
            "rollout -> genrm -> teacher -> genrm -> actor",
            32,
            "genrm comes back after its turn has ended",
        ),
        ("rollout -> teacher -> genrm -> actor", 12, "teacher has its turn before genrm"),
        (
            "rollout -> genrm -> critic -> teacher -> actor",
            21,
            "critic ends its turn before teacher",
        ),
        ("rollout -> genrm -> teacher -> actor -> critic", 41, "critic ends its turn after actor"),
        ("rollout + actor -> rollout + genrm -> teacher + genrm", 11, "actor ends its turn before"),
    ],
)
def test_an_order_of_turns_that_no_step_has_names_the_character(
    script: str, position: int, says: str
) -> None:
    recipe = document(rollout=engine(2), genrm=engine(2), teacher=engine(2), ranks=2)
    found = refused(recipe, layout=script, critic={"ranks": 2})
    (at,) = [v for v in found if v.rule.startswith(f"character {position}: {says}")]
    assert at.field == "layout"
    assert ("layout", None) in at.settings


@pytest.mark.parametrize(
    "script",
    [
        "rollout -> genrm -> teacher -> critic -> actor",
        "rollout + teacher -> genrm -> critic + actor",
        "rollout + genrm -> genrm + teacher -> actor + critic",
        "rollout + actor -> genrm + actor -> teacher + actor + critic",
        "rollout -> rollout + genrm -> teacher + actor + critic",
    ],
)
def test_an_order_of_turns_that_a_step_has_is_placed(script: str) -> None:
    recipe = document(rollout=engine(2), genrm=engine(2), teacher=engine(2), ranks=2)
    light = {"train__ray_gpu_fraction": 0.1, "critic": {"ranks": 2, "ray_gpu_fraction": 0.1}}
    assert plan(recipe, layout=script, **light)


def test_what_is_wrong_beside_the_script_is_told_with_it() -> None:
    recipe = document(rollout=engine(16), genrm=engine(4), ranks=16)
    for script in ("rollout => actor", "rollout -> genrm -> rollout"):
        found = {v.field for v in refused(recipe, layout=script)}
        assert found == {"layout", "rollout.engine.replicas", "train.ranks"}
    broken = refused(ROLES, layout="rollout -> genrm + teacher -> actor", mode="split")
    assert {v.field for v in broken} == {"layout", "mode"}


@pytest.mark.parametrize(
    ("overrides", "field", "says"),
    [
        ({"mode": "split"}, "mode", "the layout is of mode defer, the recipe says split"),
        ({"defer_roles": ["genrm", "teacher"]}, "defer_roles", "the layout defers teacher"),
        ({"defer_roles": ["teacher"], "mode": "defer"}, None, None),
    ],
)
def test_layout_and_mode_must_say_the_same(
    overrides: dict[str, Any], field: str | None, says: str | None
) -> None:
    if field is None or says is None:
        assert plan(ROLES, layout=EXAMPLE, **overrides)
        return
    (found,) = (v for v in refused(ROLES, layout=EXAMPLE, **overrides) if v.field == field)
    assert says in found.rule


def test_a_share_that_differs_says_which_settings_would_fit() -> None:
    (found,) = refused(ROLES | {"rollout": {"model": "m", "engine": engine(2, 2)}}, layout=EXAMPLE)
    assert found.settings == (("rollout.engine.replicas", 2),)
    assert plan(ROLES | {"rollout": {"model": "m", "engine": engine(4, 2)}}, layout=EXAMPLE)


def test_reservations_follow_the_layout() -> None:
    apart = document("split", rollout=engine(4), genrm=engine(4, ray_gpu_fraction=0.8), ranks=4)
    assert plan(apart, layout="rollout[1/2] + genrm[1/2] -> actor")
    (found,) = refused(apart, layout="genrm[1/2] + rollout[1/2] -> actor")
    assert "bundle 0 and 3 more would reserve 1.2" in found.rule


def test_a_script_that_nobody_reads_is_refused_before_it_is_parsed() -> None:
    """A script of 20,000 phases was drawn, and one of as many faults told each."""
    with pytest.raises(RecipeError, match=r"layout: must have at most 1000 characters"):
        read(document(), layout="rollout -> " * 20_000 + "actor")
