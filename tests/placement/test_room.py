"""Which bundle lacks what on which node; without Ray."""

from dataclasses import replace
from typing import Any

import pytest

from relax_infer.contracts.engines import BundleBinding
from relax_infer.contracts.failures import PermanentError
from relax_infer.placement import bind_pool, validate_bound_plan
from relax_infer.placement.binding import in_order
from relax_infer.placement.room import NodeRoom, best_rows, shortage, shortage_of, unfit_shape
from tests.placement.recipes import document, engine, plan


def node(name: str, gpus: float = 8, cpus: float = 8, **more: object) -> NodeRoom:
    free = {"free_gpus": gpus, "free_cpus": cpus} | more
    return NodeRoom(f"{name}-identity", f"10.0.0.{name}", gpus, cpus, **free)  # type: ignore[arg-type]


def test_what_fits_lacks_nothing() -> None:
    assert shortage(16, [node("1"), node("2")]) is None
    assert shortage(0, []) is None


def test_a_bundle_without_a_gpu_is_named_with_what_each_node_lacks() -> None:
    """pains 24."""
    assert shortage(17, [node("1"), node("2", cpus=4), node("3", gpus=0)]) == (
        "bundles 12 to 16 of 17 (1 GPU and 1 CPU each) find no room: node 10.0.0.2 (2-identi) has"
        " room for 4 and then lacks CPU (4 of 4 free); node 10.0.0.1 (1-identi) has room for 8 and"
        " then lacks GPU (8 of 8 free) and CPU (8 of 8 free); 1 node without a GPU."
    )


def test_who_holds_what_is_reserved_is_named() -> None:
    """pains 24."""
    busy = node("1", free_gpus=0.0, free_cpus=6.0, holders=("relax-run-4.pool",))
    assert shortage(1, [busy]) == (
        "bundle 0 of 1 (1 GPU and 1 CPU each) finds no room: node 10.0.0.1 (1-identi) lacks GPU (0"
        " of 8 free), held by relax-run-4.pool."
    )
    assert shortage(1, [busy.idle()]) is None


def test_a_fraction_that_somebody_reserves_leaves_no_room_for_a_bundle() -> None:
    assert shortage(1, [node("1", gpus=1, free_gpus=0.6)]) is not None


def test_of_many_nodes_the_fullest_are_named() -> None:
    text = shortage(1000, [node(f"{n}") for n in range(64)])
    assert text is not None
    assert text.count("has room for 8") == 8
    assert "and 56 nodes more" in text


def test_a_cluster_without_nodes_says_so() -> None:
    assert "the cluster has no node" in (shortage(1, []) or "")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "5", None])
async def test_a_timeout_is_checked_before_anything_is_asked_of_ray(timeout: Any) -> None:
    with pytest.raises(PermanentError, match="not a finite positive number of seconds"):
        await bind_pool("run", 1, timeout)


@pytest.mark.parametrize("gpus", [0, -1, True, 1.5, "2"])
async def test_a_pool_of_no_number_of_gpus_is_refused_with_a_cure(gpus: Any) -> None:
    with pytest.raises(PermanentError, match="cannot be of") as refused:
        await bind_pool("run", gpus, 5)
    assert "from 1" in refused.value.cure


def test_bundles_of_a_node_need_room_there() -> None:
    pinned = [{"GPU": 1.0, "CPU": 1.0, "node:10.0.0.1": 0.001}] * 3
    assert shortage_of([pinned], [node("1"), node("2")]) is None
    text = shortage_of([pinned], [node("1", gpus=2), node("2")])
    assert text is not None
    assert text.startswith("node 10.0.0.1 is asked for by 3 bundles: bundle 2 of 3")
    alike = [{"GPU": 1.0, "CPU": 1.0}] * 8
    assert shortage_of([alike, alike], [node("1"), node("2")], on_one_node=True) is None


def test_whole_nodes_come_before_a_part_of_one_whatever_ray_numbers_them() -> None:
    """A plan counts nodes from bundle 0; Ray gave the smaller node the lower id and numbers."""
    devices = [("a", 1), ("b", 3), ("b", 0), ("a", 0), ("b", 2), ("b", 1)]
    rows = [
        BundleBinding(bundle=k, node_id=name, node_ip="10.0.0.1", gpu_id=gpu)
        for k, (name, gpu) in enumerate(devices)
    ]
    assert [(r.node_id, r.gpu_id, r.bundle) for r in in_order(rows)] == [
        *(("b", 0, 2), ("b", 1, 5), ("b", 2, 4), ("b", 3, 1)),
        *(("a", 0, 3), ("a", 1, 0)),
    ]
    recipe = document("defer", 6, rollout=engine(4, 4))
    made = plan(recipe | {"cluster": {"gpus": 6, "gpus_per_node": 4}})
    validate_bound_plan(made, {"pool": in_order(rows)})
    with pytest.raises(ValueError, match="one node"):
        validate_bound_plan(made, {"pool": sorted(rows, key=lambda r: (r.node_id, r.gpu_id))})


def test_engines_that_no_node_is_large_enough_for_are_told_beforehand() -> None:
    made = plan(document("defer", 16, rollout=engine(16, 8)))
    assert unfit_shape(made, [node("1"), node("2")]) is None
    assert unfit_shape(made, [node("1", gpus=16, cpus=16)]) is None
    refused = unfit_shape(made, [node(f"{n}", gpus=4, cpus=4) for n in range(4)])
    assert refused is not None
    assert {v.field for v in refused.violations} == {
        "rollout/policy replica 0",
        "rollout/policy replica 1",
    }
    assert all("must be on one node" in v.rule for v in refused.violations)


def test_an_engine_over_nodes_takes_the_nodes_size_of_larger_ones() -> None:
    made = plan(document("defer", 16, rollout=engine(16, 16)))
    larger = [node("1", gpus=12, cpus=12), node("2"), node("3")]
    assert unfit_shape(made, larger) is None
    assert unfit_shape(made, larger[:1]) is not None


def test_a_pool_takes_what_an_earlier_one_leaves() -> None:
    made = plan(document("decoupled", 16, ranks=8, rollout=engine(8, 8)))
    assert unfit_shape(made, [node("1"), node("2")]) is None
    half = replace(node("1"), free_gpus=4.0)
    assert unfit_shape(made, [half, node("2", free_cpus=2.0)]) is not None
    assert [r.gpu_id for r in best_rows(3, [half], None)] == [0, 1, 2]


def test_a_small_pool_does_not_take_the_node_that_a_larger_one_needs_whole() -> None:
    made = plan(document("decoupled", 12, ranks=1, rollout=engine(3), genrm=engine(8, 8)))
    assert [pool for pool, _ in made.pool_sizes] == ["rollout", "genrm", "trainer"]
    assert unfit_shape(made, [node("1"), node("2", gpus=4, cpus=4)]) is None
