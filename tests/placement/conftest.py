"""A real Ray with pretended GPUs, one for the module that asks for it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Both have one address."""
    with cluster_of_two() as cluster:
        yield cluster


@contextmanager
def cluster_of_two(**second: Any) -> Iterator[Any]:
    """A Ray cluster of two nodes with eight pretended GPUs each, in the workers' job namespace;
    ``second`` is what the second has besides."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 8, "num_gpus": 8, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node, **second)
    ray.init(address=cluster.address, namespace="relax", log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def free_in_bundles() -> list[float]:
    """What is free of each bundle's GPU; a probe that lives holds a part of it."""
    import ray

    free = ray.available_resources()
    return [share for name, share in free.items() if re.match(r"GPU_group_\d+_", name)]
