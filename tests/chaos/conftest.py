"""The stack of the end-to-end tests, and what is needed to hurt it."""

from tests.e2e.conftest import client, ray, stack

__all__ = ["client", "ray", "stack"]
