"""The world of the quickstart: a task for four digits and three models of 78,208 parameters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.tiny.models import ensure_models
    from relax_infer.tiny.task import Sort4Task

_HOME = {"Sort4Task": "task", "ensure_models": "models"}

__all__ = ["Sort4Task", "ensure_models"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
