import pickle
from dataclasses import replace
from typing import Any

import pytest

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement import (
    Placement,
    PlacementError,
    model_placement,
    plan_inference_placement,
    validate_bound_placement,
    validate_bound_plan,
)
from tests.placement.recipes import document, engine, plan

ONE_GPU = plan_inference_placement(load_recipe("quickstart")).placements[0]
TWO_GPUS = replace(ONE_GPU, num_gpus=4, gpus_per_engine=2, num_gpus_per_node=4)
TWO_NODES = replace(ONE_GPU, num_gpus=4, gpus_per_engine=4, num_gpus_per_node=2)


def rows(*devices: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"bundle_index": n, "node_id": node, "node_ip": "10.0.0.1", "gpu_id": gpu}
        for n, (node, gpu) in enumerate(devices)
    ]


def cluster(gpus: int, per_node: int) -> list[dict[str, Any]]:
    """Whole nodes, as a pool of many has them."""
    return rows(*((f"node-{n // per_node:03}", n % per_node) for n in range(gpus)))


FOUR = rows(("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_the_rows_of_the_slice_come_back_in_order() -> None:
    second = replace(ONE_GPU, bundle_start=1)
    assert validate_bound_placement(second, FOUR) == FOUR[1:3]
    assert validate_bound_placement(second.to_dict(), FOUR) == FOUR[1:3]
    assert validate_bound_placement(TWO_GPUS, FOUR) == FOUR
    assert validate_bound_placement(TWO_NODES, FOUR) == FOUR
    bound = [BundleBinding(bundle=n, node_id="a", node_ip="10.0.0.1", gpu_id=n) for n in range(2)]
    assert validate_bound_placement(ONE_GPU, bound) == bound


def test_the_order_that_was_handed_in_counts() -> None:
    turned = rows(("a", 1), ("a", 0), ("b", 1), ("b", 0))
    with pytest.raises(ValueError, match="contiguous"):
        validate_bound_placement(TWO_GPUS, turned)
    chosen = validate_bound_placement(TWO_GPUS, turned, [1, 0, 3, 2])
    assert [r["bundle_index"] for r in chosen] == [1, 0, 3, 2]
    assert len(validate_bound_placement(ONE_GPU, FOUR, [2, 3])) == 2


@pytest.mark.parametrize(
    ("placement", "topology", "order", "says"),
    [
        (ONE_GPU, FOUR, [0, 0], "duplicate"),
        (ONE_GPU, [*FOUR, FOUR[0]], None, "duplicate"),
        (ONE_GPU, FOUR, [0, 7], "unknown indices"),
        (ONE_GPU, FOUR, [-1, 0], r"unknown indices \[-1\]"),
        (ONE_GPU, [FOUR[0] | {"bundle_index": -1}], None, "bundle index -1"),
        (ONE_GPU, [FOUR[0] | {"bundle_index": True}], None, "bundle index True"),
        (ONE_GPU, FOUR[:1], None, "exceeds"),
        (ONE_GPU, rows(("", 0), ("a", 1)), None, "node identity"),
        (ONE_GPU, [{"bundle_index": 0, "gpu_id": 0}, FOUR[1]], None, "node identity"),
        (ONE_GPU, rows(("a", True), ("a", 1)), None, "gpu id True is not a number"),
        (ONE_GPU, rows(("a", "GPU-1"), ("a", 1)), None, "gpu id"),
        (ONE_GPU, rows(("a", -1), ("a", 1)), None, "gpu id"),
        (ONE_GPU, rows(("a", 0), ("a", "0")), None, "same physical GPU"),
        (TWO_GPUS, rows(("a", 0), ("b", 1), ("a", 2), ("a", 3)), None, "one node"),
        (TWO_GPUS, rows(("a", 0), ("a", 2), ("b", 0), ("b", 1)), None, "contiguous"),
        (TWO_GPUS, rows(("a", 1), ("a", 0), ("b", 0), ("b", 1)), None, "ascending"),
        (TWO_NODES, rows(("a", 0), ("a", 1), ("a", 2), ("a", 3)), None, "distinct nodes"),
    ],
)
def test_what_does_not_fit_is_named(
    placement: Placement, topology: list[dict[str, Any]], order: list[int] | None, says: str
) -> None:
    with pytest.raises(PlacementError, match=says) as refused:
        validate_bound_placement(placement.to_dict(), topology, order)
    assert all(v.field and v.rule and v.cure for v in refused.value.violations)


def test_every_violation_of_a_layout_is_told_at_once() -> None:
    topology = rows(("a", 0), ("a", 2), ("a", 3), ("b", 4), ("a", 0), ("c", "GPU-1"), ("", 7))
    placement = replace(TWO_GPUS, num_gpus=8)
    with pytest.raises(PlacementError) as refused:
        validate_bound_placement(placement, topology)
    told = [(v.field, v.rule) for v in refused.value.violations]
    assert [field for field, _ in told] == [
        "rollout/policy",
        "bundle 4",
        "bundle 5",
        "bundle 6",
        "rollout/policy replica 0",
        "rollout/policy replica 1",
    ]
    assert "ends at bundle 8, which exceeds the pool of 7" in told[0][1]
    assert "bundle 0 are the same physical GPU 0 of node a" in told[1][1]
    again = pickle.loads(pickle.dumps(refused.value))
    assert str(again) == str(refused.value)
    assert again.violations == refused.value.violations
    assert str(again).startswith("the GPUs that Ray gave do not fit the plan: ")


def test_a_replica_over_two_nodes_needs_its_first_gpu_to_be_a_nodes_first() -> None:
    """pains 23: 16 GPUs on nodes of 8; shuffled bundle numbers change nothing."""
    wide = replace(ONE_GPU, num_gpus=16, gpus_per_engine=16, num_gpus_per_node=8)
    topology = cluster(16, 8)
    order = [5, 12, 3, 9, 0, 14, 7, 1, 11, 6, 2, 15, 10, 4, 13, 8]
    shuffled = [topology[k] | {"bundle_index": n} for n, k in enumerate(order)]
    with pytest.raises(PlacementError, match="one node"):
        validate_bound_placement(wide, shuffled)
    back = sorted(range(16), key=lambda n: (shuffled[n]["node_id"], shuffled[n]["gpu_id"]))
    bound = validate_bound_placement(wide, shuffled, back)
    assert [(row["node_id"], row["gpu_id"]) for row in bound] == [
        (row["node_id"], row["gpu_id"]) for row in topology
    ]


def bound(*devices: tuple[str, int]) -> list[BundleBinding]:
    return [
        BundleBinding(bundle=n, node_id=node, node_ip="10.0.0.1", gpu_id=gpu)
        for n, (node, gpu) in enumerate(devices)
    ]


def test_the_pools_of_a_plan_are_checked_together() -> None:
    made = plan(document("decoupled", 4, ranks=2, rollout=engine(2, 2)))
    good = {"rollout": bound(("a", 0), ("a", 1)), "trainer": bound(("b", 0), ("b", 1))}
    validate_bound_plan(made, good)
    with pytest.raises(PlacementError, match="pool trainer: its bundle 0 and one of pool rollout"):
        validate_bound_plan(made, good | {"trainer": bound(("a", 1), ("b", 1))})
    with pytest.raises(PlacementError, match="trainer: it ends at bundle 2"):
        validate_bound_plan(made, good | {"trainer": bound(("b", 0))})
    with pytest.raises(PlacementError, match="bundle 0 are the same physical GPU") as twice:
        validate_bound_plan(made, good | {"trainer": bound(("b", 0), ("b", 0))})
    assert len(twice.value.violations) == 1
    with pytest.raises(PlacementError, match="exceeds the pool of 0"):
        validate_bound_plan(made, {})


def test_a_gpu_is_one_under_whatever_node_it_is_told() -> None:
    """Two Rays on a host, or one that was started again before the first was gone."""
    twice = rows(("a", 0), ("b", 0))
    validate_bound_placement(ONE_GPU, twice)
    known = [row | {"gpu_uuid": "GPU-1"} for row in twice]
    with pytest.raises(PlacementError, match="bundle 0 are the same physical GPU GPU-1"):
        validate_bound_placement(ONE_GPU, known)
    validate_bound_placement(ONE_GPU, [known[0], known[1] | {"gpu_uuid": "GPU-2"}])
    partly = [known[0], known[0] | {"bundle_index": 1, "gpu_uuid": None}]
    with pytest.raises(PlacementError, match="same physical GPU 0 of node a"):
        validate_bound_placement(ONE_GPU, partly)
    made = plan(document("decoupled", 2, ranks=1, rollout=engine(1)))
    pools = {"rollout": bound(("a", 0)), "trainer": bound(("b", 0))}
    validate_bound_plan(made, pools)
    same = {
        pool: [row.model_copy(update={"gpu_uuid": "GPU-1"}) for row in mine]
        for pool, mine in pools.items()
    }
    with pytest.raises(PlacementError, match="one of pool rollout are the same physical GPU GPU-1"):
        validate_bound_plan(made, same)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_plan_fits_a_cluster_of_whole_nodes(name: str) -> None:
    plan = plan_inference_placement(load_recipe(name))
    for placement in plan.placements:
        size = dict(plan.pool_sizes)[placement.pool]
        bound = validate_bound_placement(
            placement.to_dict(), cluster(size, placement.num_gpus_per_node)
        )
        assert [row["bundle_index"] for row in bound] == list(
            range(placement.bundle_start, placement.bundle_stop)
        )


def test_a_pool_that_begins_within_a_node_is_refused_for_engines_over_nodes() -> None:
    plan = plan_inference_placement(load_recipe("decoupled-64x8-pd"))
    decode = model_placement(plan, "rollout", "policy", "decode-1")
    assert decode is not None
    shifted = cluster(200, 8)[4:196]
    topology = [row | {"bundle_index": n} for n, row in enumerate(shifted)]
    with pytest.raises(ValueError, match="one node"):
        validate_bound_placement(decode, topology)
