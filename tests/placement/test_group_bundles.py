"""Which of the bound bundles an engine group gets, and when they are of no use to it."""

from pathlib import Path

import pytest

from activities.placement import bundles_of
from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec
from relax_infer.contracts.failures import PermanentError
from tests.engines.checkpoints import group_spec


def group(**sizes: int) -> EngineGroupSpec:
    return group_spec(Path("/nowhere"), bundles=(), **sizes)


def pool(*nodes: int) -> list[BundleBinding]:
    """So many GPUs on each node."""
    places = [(node, gpu) for node, count in enumerate(nodes) for gpu in range(count)]
    return [
        BundleBinding(bundle=k, node_id=f"n{node}", node_ip=f"10.0.0.{node}", gpu_id=gpu)
        for k, (node, gpu) in enumerate(places)
    ]


def test_a_group_gets_the_first_bundles_of_the_pool():
    rows = pool(8, 8)
    assert bundles_of(group(replicas=2, gpus_per_replica=4), rows) == tuple(rows[:8])
    wide = group(replicas=1, gpus_per_replica=16, nodes_per_replica=2)
    assert bundles_of(wide, rows) == tuple(rows)


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        ((7, 9), {"gpus_per_replica": 16, "nodes_per_replica": 2}),
        ((16,), {"gpus_per_replica": 16, "nodes_per_replica": 2}),
        ((1, 1), {"gpus_per_replica": 2}),
    ],
)
def test_parts_of_a_replica_that_are_not_on_nodes_of_their_own_are_refused(nodes, sizes):
    with pytest.raises(PermanentError, match="policy/replica-0 needs"):
        bundles_of(group(replicas=1, **sizes), pool(*nodes))
