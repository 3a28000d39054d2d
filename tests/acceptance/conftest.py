"""Fixtures of other rooms: workflows over the scripted world."""

from tests.workflows.conftest import temporal, working

__all__ = ["temporal", "working"]
