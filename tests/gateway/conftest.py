"""Fixtures of the gateway's tests."""

from tests.local_ray import ray_cluster

__all__ = ["ray_cluster"]
