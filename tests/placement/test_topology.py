from dataclasses import replace
from typing import Any

import pytest

from relax_infer.config import load_recipe
from relax_infer.contracts.engines import BundleBinding
from relax_infer.placement import Placement, plan_inference_placement, validate_bound_placement

ONE_GPU = plan_inference_placement(load_recipe("quickstart")).placements[0]
TWO_GPUS = replace(ONE_GPU, num_gpus=4, gpus_per_engine=2, num_gpus_per_node=4)
TWO_NODES = replace(ONE_GPU, num_gpus=4, gpus_per_engine=4, num_gpus_per_node=2)


def rows(*devices: tuple[str, Any]) -> list[dict[str, Any]]:
    return [
        {"bundle_index": n, "node_id": node, "node_ip": "10.0.0.1", "gpu_id": gpu}
        for n, (node, gpu) in enumerate(devices)
    ]


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
