"""A real Ray with pretended GPUs, one for the module that asks for it."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Two pretended GPUs, in a job namespace as the workers use it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray.init(
        address="local",  # also where a test of the other lane has a cluster up
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        namespace="relax",
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
