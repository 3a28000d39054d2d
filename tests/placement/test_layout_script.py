"""The layout script: grammar, slots, transitions, and what it refuses with its character."""

from typing import Any

import pytest

from relax_infer.placement import LayoutError, parse_layout
from tests.placement.recipes import document, engine, plan, refused

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


def test_slots_are_free_in_every_phase_of_a_role() -> None:
    """Alone the judge would begin at 0, but later it is beside the rollout."""
    made = plan(
        document(rollout=engine(4), genrm=engine(4)),
        mode="split",
        layout="rollout[1/2] -> genrm[1/2] -> rollout[1/2] + genrm[1/2] -> actor[/]",
    )
    assert [(p.role, p.bundle_start) for p in made.placements] == [("rollout", 0), ("genrm", 4)]
    assert made.phases[1].slots[0].bundle_start == 4
    assert [t.activate for t in made.transitions] == [
        ("rollout",),
        ("genrm",),
        ("rollout",),
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
    ],
)
def test_a_script_off_the_grammar_names_the_character(
    script: str, position: int, says: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(script)
    assert caught.value.fault.position == position
    assert says in str(caught.value)
    (found,) = (v for v in refused(document(), layout=script) if v.field == "layout")
    assert found.rule.startswith(f"character {position}: ")


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


def test_slots_that_cannot_stay_are_refused() -> None:
    """Three roles that meet in pairs need 12 GPUs, though each pair needs 8."""
    found = refused(
        document(rollout=engine(4), genrm=engine(4), teacher=engine(4)),
        mode="split",
        layout="rollout + genrm -> genrm + teacher -> teacher + rollout -> actor",
    )
    assert "character 28: teacher finds no slots that stay the same" in found[0].rule


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
