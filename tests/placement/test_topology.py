from dataclasses import replace
from typing import Any

import pytest

from relax_infer.config import load_recipe, shipped_recipes
from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement import (
    Placement,
    model_placement,
    plan_inference_placement,
    validate_bound_placement,
)

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
        (ONE_GPU, [FOUR[0] | {"bundle_index": -1}], None, "bundle index -1"),
        (ONE_GPU, [FOUR[0] | {"bundle_index": True}], None, "bundle index True"),
        (ONE_GPU, FOUR[:1], None, "exceeds"),
        (ONE_GPU, rows(("", 0), ("a", 1)), None, "node identity"),
        (ONE_GPU, rows(("a", "GPU-1"), ("a", 1)), None, "gpu id"),
        (ONE_GPU, rows(("a", -1), ("a", 1)), None, "gpu id"),
        (ONE_GPU, rows(("a", 0), ("a", "0")), None, "same physical GPU"),
        (TWO_GPUS, rows(("a", 0), ("b", 1), ("a", 2), ("a", 3)), None, "one node"),
        (TWO_GPUS, rows(("a", 0), ("a", 2), ("b", 0), ("b", 1)), None, "contiguous"),
        (TWO_NODES, rows(("a", 0), ("a", 1), ("a", 2), ("a", 3)), None, "distinct nodes"),
    ],
)
def test_what_does_not_fit_is_named(
    placement: Placement, topology: list[dict[str, Any]], order: list[int] | None, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        validate_bound_placement(placement, topology, order)


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
