"""What holds for every recipe: no overlap, no bundle above one GPU, JSON both ways, cures."""

import json
from collections import defaultdict
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_infer.config import Recipe, load_recipe, read_recipe
from relax_infer.contracts.fractions import STEPS, ray_steps
from relax_infer.placement import (
    InferencePlacementPlan,
    PlacementError,
    Violation,
    plan_inference_placement,
)

SIZES = st.sampled_from([1, 1, 2, 3, 4, 5, 8, 16])
SHARES = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, "auto", "auto"])
FLAGS = st.dictionaries(
    st.sampled_from(["tp_size", "pp-size", "dp_size", "enable_dp_attention", "port", "page_size"]),
    st.sampled_from([1, 2, 3, 8, True, "four"]),
    max_size=2,
)
HOLDERS = st.builds(
    "{}{}".format,
    st.sampled_from(["rollout", "genrm", "teacher", "actor", "critic"]),
    st.sampled_from(["", "", "", "[/]", "[1/2]", "[1/4]"]),
)
SCRIPTS = st.one_of(
    st.none(),
    st.sampled_from(
        [
            "rollout -> genrm -> teacher -> actor",
            "rollout + genrm -> teacher -> actor",
            "rollout + genrm + teacher -> critic -> actor",
            "rollout -> actor",
            "rollout[1/2] ->",
        ]
    ),
    st.lists(
        st.lists(HOLDERS, min_size=1, max_size=3, unique=True).map(" + ".join),
        min_size=1,
        max_size=4,
    ).map(" -> ".join),
)
ENGINES = st.fixed_dictionaries(
    {"replicas": st.integers(1, 6), "gpus_per_replica": SIZES},
    optional={
        "ray_gpu_fraction": SHARES,
        "server_args": FLAGS,
        "offload": st.sampled_from(["memory_saver", "restart", "none"]),
    },
)
GROUPS = st.lists(
    st.fixed_dictionaries(
        {
            "worker_type": st.sampled_from(["regular", "prefill", "decode"]),
            "replicas": st.integers(1, 3),
            "gpus_per_replica": SIZES,
        }
    ),
    max_size=3,
)
FURTHER = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.just("m"),
            "model_id": st.sampled_from(["policy", "judge", "teacher", "second"]),
            "engine": ENGINES,
        }
    ),
    max_size=2,
)
BUDGET = {"num_gpus": st.integers(1, 32)}
ELSEWHERE = {"url": st.just("http://judge:30000")}
AUTOSCALED = st.fixed_dictionaries(
    {
        "min_replicas": st.integers(1, 2),
        "max_replicas": st.integers(2, 4),
        "in_flight_low": st.just(1),
        "in_flight_high": st.just(9),
    },
    optional={"models": st.just(["none"])},
)
TRAINING = st.none() | st.fixed_dictionaries(
    {"ranks": st.integers(1, 16)}, optional={"ray_gpu_fraction": st.sampled_from([0.1, 0.4, 0.8])}
)


def scorer(**more: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"model": st.just("m"), "engine": ENGINES, "extra_models": FURTHER},
        optional=BUDGET | more,
    )


RECIPES = st.fixed_dictionaries(
    {
        "name": st.just("any"),
        "mode": st.sampled_from(["defer", "split", "decoupled"]),
        "layout": SCRIPTS,
        "cluster": st.fixed_dictionaries(
            {
                "gpus": st.integers(1, 64),
                "gpus_per_node": st.sampled_from([None, 4, 7, 8]),
            }
        ),
        "rollout": st.fixed_dictionaries(
            {"model": st.just("m"), "engine": ENGINES},
            optional={
                "server_groups": GROUPS,
                "extra_models": FURTHER,
                "external": st.booleans(),
                "sampling": st.just({"temperature": 0.5}),
                **BUDGET,
            },
        ),
        "genrm": scorer(**ELSEWHERE),
        "teacher": scorer(**ELSEWHERE),
        "reward": st.fixed_dictionaries({"source": st.sampled_from(["genrm", "exact", "none"])}),
        "distillation": st.none() | st.just({"coefficient": 1.0}),
        "train": st.fixed_dictionaries(
            {"ranks": st.integers(1, 16)},
            optional={
                "offload": st.booleans(),
                "mini_batches": st.sampled_from([2, 500]),
                "algorithm": st.just({"estimator": "ppo"}),
                "schedule": st.just({"style": "cosine", "warmup_steps": 50}),
                "weights": st.just({"transport": "process_group"}),
                "ray_gpu_fraction": st.sampled_from([0.0, 0.4, 0.9]),
            },
        ),
        "critic": TRAINING,
        "reference": TRAINING,
        "actor_fwd": TRAINING,
    },
    optional={
        "defer_roles": st.lists(st.sampled_from(["genrm", "teacher", "rollout"]), max_size=2),
        "debug": st.sampled_from(["train_only", "rollout_only"]),
        "max_staleness": st.integers(0, 2),
        "data": st.just({"config": {"size": 3}}),
        "autoscale": st.fixed_dictionaries(
            {"rollout": AUTOSCALED}, optional={"genrm": AUTOSCALED, "teacher": AUTOSCALED}
        ),
    },
)

EXAMPLES = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def planned(recipe: Recipe) -> InferencePlacementPlan | tuple[Violation, ...]:
    """The plan, or why there is none."""
    try:
        return plan_inference_placement(recipe)
    except PlacementError as error:
        return error.violations


def cured(recipe: dict[str, Any]) -> tuple[InferencePlacementPlan, dict[str, Any]]:
    """The plan once every reported violation is cured, all of them at once, and by what."""
    made = planned(read_recipe(recipe))
    if isinstance(made, InferencePlacementPlan):
        return made, {}
    overrides: dict[str, Any] = {}
    for key, value in (setting for v in made for setting in v.settings):
        assert overrides.setdefault(key, value) == value, f"two cures of {key}: {made}"
    again = planned(read_recipe(recipe, overrides))
    assert isinstance(again, InferencePlacementPlan), f"{made} leave {again}"
    return again, overrides


@given(RECIPES)
@EXAMPLES
def test_a_refused_recipe_is_placed_once_its_violations_are_cured(recipe: dict[str, Any]) -> None:
    made, overrides = cured(recipe)
    assert planned(load_recipe(recipe, overrides)) == made
    check(made)


@given(RECIPES)
@EXAMPLES
def test_a_recipe_is_placed_soundly_or_refused_with_a_cure_for_each_violation(
    recipe: dict[str, Any],
) -> None:
    read = read_recipe(recipe)
    before = read.model_dump()
    made = planned(read)
    assert made == planned(read)
    if isinstance(made, InferencePlacementPlan):
        check(made)
    else:
        assert made
        assert all(v.field and v.rule and v.cure and v.settings for v in made)
    assert read.model_dump() == before


@given(RECIPES)
@EXAMPLES
def test_a_plan_is_the_same_after_json(recipe: dict[str, Any]) -> None:
    made, _ = cured(recipe)
    document = made.to_dict()
    for sort_keys in (False, True):
        text = json.dumps(document, sort_keys=sort_keys)
        again = InferencePlacementPlan.from_dict(json.loads(text))
        assert again == made
        assert again.to_dict() == document


def check(made: InferencePlacementPlan) -> None:
    """Nobody overlaps in a phase, nothing leaves its pool, no bundle is reserved above one GPU."""
    pools = dict(made.pool_sizes)
    assert sum(pools.values()) == made.total_required_gpus
    for phase in made.phases:
        held: dict[str, set[int]] = defaultdict(set)
        for slot in phase.slots:
            bundles = set(range(slot.bundle_start, slot.bundle_stop))
            assert bundles
            assert not bundles & held[slot.pool], (phase.name, slot)
            assert slot.bundle_stop <= pools[slot.pool]
            held[slot.pool] |= bundles
    for role in {slot.role for phase in made.phases for slot in phase.slots}:
        slots = {
            tuple(s for s in phase.slots if s.role == role)
            for phase in made.phases
            if role in phase.roles
        }
        assert len(slots) == 1, f"{role} does not keep its slots"
    check_engines(made)
    check_shares(made)


def check_engines(made: InferencePlacementPlan) -> None:
    """Each engine is within a node, or over whole nodes from a node's first GPU."""
    for p in made.placements:
        assert p.tp * p.pp == p.gpus_per_engine
        assert p.replicas * p.gpus_per_engine == p.num_gpus
        for start in range(p.bundle_start, p.bundle_stop, p.gpus_per_engine):
            within = start % p.num_gpus_per_node
            if p.nodes_per_engine == 1:
                assert within + p.gpus_per_engine <= p.num_gpus_per_node
            else:
                assert within == 0
                assert p.gpus_per_worker == p.num_gpus_per_node


def check_shares(made: InferencePlacementPlan) -> None:
    reserved: dict[tuple[str, int], int] = defaultdict(int)
    for p in made.placements:
        for bundle in p.heads:
            reserved[p.pool, bundle] += ray_steps(p.ray_gpu_fraction)
    for t in made.training:
        for bundle in range(t.bundle_start, t.bundle_stop):
            reserved[t.pool, bundle] += ray_steps(t.ray_gpu_fraction)
    assert all(total <= STEPS for total in reserved.values())
