"""Fixtures of the gateway's tests."""

from tests.placement.conftest import ray_cluster

__all__ = ["ray_cluster"]
